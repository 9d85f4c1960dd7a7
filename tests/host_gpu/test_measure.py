"""The measured device's commands, on host memory: each is answered, and a bad one is not the end."""

from __future__ import annotations

import asyncio
import ctypes
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.cli.bench_gpu_lending import Lending
from kvpool.client.engine_registration import GpuRegion
from kvpool.client.gpu import ExportedTensors
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool_gpuagent.measure.cache_plan import CachePlan
from kvpool_gpuagent.measure.commands import serve
from kvpool_gpuagent.measure.measurement import Measurement
from kvpool_gpuagent.measure.moved import Moved, joined
from tests.fixtures.gpu_agent import FakeGpu
from tests.fixtures.host_agent import HostGpuDevice
from tests.fixtures.host_gpu import HostRuntime
from tests.fixtures.launching_engine import EngineRuntime, address_of

CACHE = {
    "op": "map",
    "geometry": [2, 2, 16, 0],
    "codec": "RAW",
    "layout": "vllm_nhd",
    "heads": [0, 2],
    "block_tokens": 16,
    "block_count": 8,
    "chunk_tokens": 16,
}
PAGE_BYTES = 2 * 2 * 2 * 16 * 2 * 16  # layers, planes, heads, dim, bytes, tokens
RUN = {"op": "run", "size_bytes": 1, "in_flight": 2, "seconds": 0.0}  # no time at all: what is in flight still counts


class Bench:
    """A measurement, spoken to line by line."""

    def __init__(self) -> None:
        gpu = FakeGpu()
        self.engine = EngineRuntime(gpu)
        self.device = HostGpuDevice(gpu, HostRuntime(), None, 8 << 20)
        sizes = CachePlan.of(CACHE).layout.handle_sizes
        self.content = [np.random.default_rng(7).bytes(size) for size in sizes]
        self._regions = [SharedMemoryRegion(size) for size in sizes]
        self.handles = []
        exported: list[GpuRegion] = []
        for region, content in zip(self._regions, self.content, strict=True):
            region.buffer[:] = content
            memory = gpu.export(region)
            exported.append(GpuRegion(region.size_bytes, memory))
            self.handles.append([memory.device_uuid, memory.handle.hex(), 0, region.size_bytes, region.size_bytes])
        addresses = tuple(address_of(region) for region in self._regions)
        self.exported = ExportedTensors(tuple(exported), (), addresses, 0)

    def open(self) -> Measurement:
        return Measurement(self.device, _copy, direction_bytes=1 << 20, buffer_bytes=1 << 16)

    def ask(self, *commands: dict[str, Any] | str | Callable[[], object]) -> list[dict[str, Any]]:
        """The answers, without the first line. A callable has no answer: it is called between two commands."""
        answers = io.StringIO()
        assert asyncio.run(serve(self.open, _Script(commands), answers)) == 0
        about, *rest = [json.loads(line) for line in answers.getvalue().splitlines()]
        assert about["device"] == "host" and about["torch"]
        assert len(rest) == sum(not callable(each) for each in commands)
        return rest

    def unchanged(self) -> bool:
        """Whether the cache has what it had."""
        return [bytes(region.buffer) for region in self._regions] == self.content


class _Script:
    """Commands that are read one after another."""

    def __init__(self, commands: Sequence[dict[str, Any] | str | Callable[[], object]]) -> None:
        self._commands = iter(commands)

    def readline(self) -> str:
        for each in self._commands:
            if not callable(each):
                return (each if isinstance(each, str) else json.dumps(each)) + "\n"
            each()
        return ""


def _copy(destination: int, source: int, size_bytes: int, stream: int) -> None:
    ctypes.memmove(destination, source, size_bytes)


def test_a_mapped_cache_is_stored_loaded_and_copied_beside() -> None:
    bench = Bench()
    mapped, *runs, unmapped = bench.ask(
        CACHE | {"handles": bench.handles},
        *(RUN | {"what": what} for what in ("store", "load", "copy-out", "copy-in", "copy-both")),
        RUN | {"what": "copy-out", "memory": "allocated", "size_bytes": 3 * PAGE_BYTES},
        {"op": "unmap"},
    )
    assert mapped["logical_page_bytes"] == PAGE_BYTES and mapped["logical_ratio"] == 1.0
    assert mapped["pages"] == 4 and mapped["ways"][0] == "bursts" and mapped["copies_bytes"]
    assert mapped["run_bytes"] == 2 * 16 * 2 * 16
    assert [run["transfers"] for run in runs] == [2, 2, 2, 2, 4, 2]
    for run in runs:
        assert run["bytes_per_s"] > 0 and run["p50_s"] > 0
        assert run["transfer_bytes"] == PAGE_BYTES * (3 if run is runs[-1] else 1)
    assert [set(run["ways"]) for run in runs[:2]] == [{"bursts"}] * 2
    assert unmapped == {} and bench.device.mapped == 0
    assert bench.unchanged(), "loads put back what was stored of the same blocks"


def test_a_forced_way_is_taken_until_it_is_free_again() -> None:
    bench = Bench()
    _, _, forced, _, free = bench.ask(
        CACHE | {"handles": bench.handles},
        {"op": "way", "way": "runs"},
        RUN | {"what": "both"},
        {"op": "way", "way": None},
        RUN | {"what": "store"},
    )
    assert set(forced["ways"]) == {"runs"} and set(free["ways"]) == {"bursts"}


def test_a_codec_moves_fewer_bytes_than_it_stands_for() -> None:
    bench = Bench()
    mapped, run = bench.ask(CACHE | {"handles": bench.handles, "codec": "INT8_GROUP8"}, RUN | {"what": "store"})
    assert mapped["logical_page_bytes"] == run["transfer_bytes"] == PAGE_BYTES
    assert mapped["logical_ratio"] == pytest.approx(1.6) and not mapped["copies_bytes"]


def test_what_cannot_be_done_is_answered_and_the_next_command_served() -> None:
    bench = Bench()
    answers = bench.ask(
        "no json",
        {"op": "reset"},
        RUN | {"what": "store"},
        {"op": "way", "way": None},
        CACHE | {"handles": bench.handles, "layout": "no"},
        {"op": "peer", "peer": 1} | CACHE | {"op": "peer"},
        {"op": "peer-run", "what": "pull"},
        RUN | {"what": "copy-out", "size_bytes": 1 << 30},
        RUN | {"what": "copy-out", "size_bytes": 1 << 10},
    )
    assert [answer.get("type") for answer in answers] == [
        *("JSONDecodeError", "ValueError", "ValueError", "ValueError", "AttributeError", "NotServed", "ValueError"),
        *("ValueError", None),
    ]
    assert "op must be one of listen, map, unmap, way, run" in answers[1]["error"]
    assert "no cache is mapped" in answers[2]["error"]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def lending(bench: Bench) -> Iterator[Lending]:
    """The engine's side: its launcher, its session."""
    lending = Lending(scratch_bytes=1 << 20, runtime=bench.engine)
    yield lending
    lending.stop()


def test_an_engine_launches_for_a_measured_cache(bench: Bench, lending: Lending, tmp_path: Path) -> None:
    socket = {"socket": str(tmp_path / "agent.sock")}
    mapped, _, run, _, free = bench.ask(
        {"op": "listen"} | socket,
        lambda: lending.lend(bench.exported, CACHE | socket),
        CACHE | {"handles": bench.handles, "lent": True},
        {"op": "way", "way": "engine"},
        RUN | {"what": "both"},
        {"op": "unmap"},
        lending.close,
        CACHE | {"handles": bench.handles},
    )[1:]
    assert "engine" in mapped["ways"] and "engine" not in free["ways"]
    assert set(run["ways"]) == {"engine"} and run["transfers"] == 4
    assert bench.unchanged(), "loads put back what was stored of the same blocks"


def test_an_engine_that_lends_again_launches_for_its_new_cache(bench: Bench, lending: Lending, tmp_path: Path) -> None:
    socket = {"socket": str(tmp_path / "agent.sock")}
    other = CACHE | {"chunk_tokens": 32}
    answers = bench.ask(
        {"op": "listen"} | socket,
        lambda: lending.lend(bench.exported, CACHE | socket),
        {"op": "listen"} | socket,
        lambda: lending.lend(bench.exported, other | socket),
        CACHE | {"handles": bench.handles, "lent": True},
        other | {"handles": bench.handles, "lent": True},
        {"op": "way", "way": "engine"},
        RUN | {"what": "store"},
        {"op": "unmap"},
        lending.stop,
    )
    assert "for another cache" in answers[2]["error"]
    assert set(answers[-2]["ways"]) == {"engine"}


def test_figures_of_an_engine_that_stopped_launching_are_refused(
    bench: Bench, lending: Lending, tmp_path: Path
) -> None:
    socket = {"socket": str(tmp_path / "agent.sock")}

    def fail() -> None:
        bench.engine.failure = RuntimeError("a kernel faulted")

    *_, failed, bursts, _ = bench.ask(
        {"op": "listen"} | socket,
        lambda: lending.lend(bench.exported, CACHE | socket),
        CACHE | {"handles": bench.handles, "lent": True},
        {"op": "way", "way": "engine"},
        fail,
        RUN | {"what": "store"},
        RUN | {"what": "store"},
        {"op": "unmap"},
        lending.stop,
    )
    assert failed["type"] == "RuntimeError" and "a kernel faulted" in failed["error"]
    assert set(bursts["ways"]) == {"bursts"}


def test_without_an_engine_that_launches_its_way_is_refused(bench: Bench) -> None:
    lent, _, way = bench.ask(
        CACHE | {"handles": bench.handles, "lent": True},
        CACHE | {"handles": bench.handles},
        {"op": "way", "way": "engine"},
    )
    assert "no engine lends scratch" in lent["error"] and "no engine launches" in way["error"]


def test_a_device_that_cannot_be_opened_is_said_so_in_the_first_line() -> None:
    def refuse() -> Measurement:
        raise OSError("no driver")

    answers = io.StringIO()
    assert asyncio.run(serve(refuse, io.StringIO(), answers)) == 1
    assert json.loads(answers.getvalue()) == {"error": "no driver", "type": "OSError"}


def test_directions_side_by_side_add_up() -> None:
    answer = joined([Moved(100, 2.0, [0.5, 0.7]), Moved(300, 3.0, [0.1, 0.2])])
    assert answer == {"bytes_per_s": 150.0, "p50_s": 0.5, "transfers": 4, "transfer_bytes": 100}
