"""Settings of a service's process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvpool_server.lifecycle import Stop, run_service
from kvpool_server.process import fast_loop_factory, poll_grpc_directly

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


TABLE_SCRIPT = """
import gc
from kvpool_server.process import tune_process
tune_process()
collected = [generation["collections"] for generation in gc.get_stats()]
for _ in range(20):
    table = [[number] for number in range(20_000)]
print([generation["collections"] - before for generation, before in zip(gc.get_stats(), collected)])
"""


def test_replacing_a_large_table_does_not_walk_over_the_whole_heap() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TABLE_SCRIPT],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    youngest, middle, oldest = json.loads(done.stdout)
    assert youngest <= 20 and middle <= 1 and oldest == 0


def test_uvloop_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[asyncio.AbstractEventLoop] = []

    def new_event_loop() -> asyncio.AbstractEventLoop:
        made.append(asyncio.new_event_loop())
        return made[-1]

    monkeypatch.setitem(sys.modules, "uvloop", SimpleNamespace(new_event_loop=new_event_loop))

    async def main(stop: Stop) -> None:
        assert asyncio.get_running_loop() is made[0]

    assert run_service(main, service="test") == 0


def test_without_it_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)  # an import of None fails
    assert fast_loop_factory() is None


@pytest.mark.parametrize(("given", "kept"), [(None, "-event_engine_client,-event_engine_listener"), ("mine", "mine")])
def test_grpc_polls_directly_unless_the_environment_says_otherwise(
    given: str | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_EXPERIMENTS", given or "")
    if given is None:
        monkeypatch.delenv("GRPC_EXPERIMENTS")
    poll_grpc_directly()
    assert os.environ["GRPC_EXPERIMENTS"] == kept


@pytest.mark.parametrize("service", ["kvpool_index", "kvpool_gpuagent"])
def test_services_of_small_messages_choose_before_grpc_is_imported(service: str) -> None:
    program = f"import os, sys, {service}; assert 'grpc' not in sys.modules; print(os.environ['GRPC_EXPERIMENTS'])"
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True)
    assert said.stdout.strip() == "-event_engine_client,-event_engine_listener"


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
