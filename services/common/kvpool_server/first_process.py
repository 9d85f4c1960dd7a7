"""Run a service as the first process of a container: `python -m kvpool_server.first_process kvpool_index.main ARG...`

The kernel drops every signal for which the first process of a PID namespace has no handler, SIGTERM too. A service has
its own once it is imported; one that is stopped within that second would be waited for until it is killed.
"""

import os
import runpy
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(0)  # stopped as asked, and nothing had begun that could be left behind


def main() -> None:
    """Hand over to the module that the first argument names, with the other arguments."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m kvpool_server.first_process MODULE [ARGUMENT ...]")
    for number in SIGNALS:
        signal.signal(number, _end)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
