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


_START = """
import sys, threading
from kvpool_server.process import mapping_large_buffers, tune_process

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def load():
    parts = [bytearray(b"x" * (1 << 20)) for _ in range(48)]
    kept.append(bytearray(b"x" * (1 << 20)))
    del parts

kept = []
tune_process()
before = resident_bytes()
with mapping_large_buffers():
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
print(resident_bytes() - before >> 20)
"""


def test_what_a_start_frees_on_a_thread_goes_back_to_the_system() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _START],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert int(done.stdout) < 8, "the heaps of threads keep what is freed in them"
