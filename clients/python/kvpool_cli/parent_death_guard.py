"""Runs a program that ends when its parent does.

Usage: `python -m kvpool_cli.parent_death_guard PARENT_PID PROGRAM ARGUMENT...`.

For programs that cannot ask the kernel for that themselves. The kernel means the parent's thread that started us.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Become PROGRAM. Returns only if that is not possible, or the parent is gone already."""
    parent_pid, program = int(argv[0]), argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        return 1
    try:
        os.execv(program[0], program)
    except OSError as error:
        sys.stderr.write(f"{program[0]} cannot be run: {error.strerror}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
