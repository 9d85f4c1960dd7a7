"""Settings of a service's process."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource
from kvpool_server.process import tune_process
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
tune_process()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_service_may_open_as_many_files_as_the_system_allows() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.stdout.strip() == "(512, 512)"
