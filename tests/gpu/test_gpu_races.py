"""Engines that reuse their blocks while streams are late: what is stored is what they wrote before their event."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool.testing import eventually_sync
from tests.fixtures.gpu_cluster import GpuHost

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

CHUNKS = [0, 4]
AGENTS = ["rank0", "rank1"]
DELAYS_S = (0.7, 3.0, 12.0)  # the next where the host stood still for longer than the stream was late


@pytest.fixture(scope="module", params=AGENTS)
def rank(host: GpuHost, request: pytest.FixtureRequest) -> Iterator[str]:
    """A registered rank."""
    device = f"cuda:{host.second_gpu if request.param == 'rank1' else 0}"
    host.engine.ask("open", rank="racer", shape="vllm nhd", endpoint=host.endpoint(request.param), device=device)
    yield "racer"
    assert host.engine.ask("close", rank="racer")


def seeds(start: int, request: pytest.FixtureRequest) -> tuple[int, int]:
    """New for each agent: what is stored already would not be gathered."""
    first = start + 2 * AGENTS.index(request.node.callspec.params["rank"])
    return first, first + 1


def late(start: int, request: pytest.FixtureRequest) -> Iterator[tuple[int, int, float]]:
    """Two new seeds and a delay, until the block that uses them returns."""
    for number, delay_s in enumerate(DELAYS_S):
        yield (*seeds(10 * start + 10 * number, request), delay_s)
    pytest.fail("the stream was never late")


def test_a_store_after_a_late_event_stores_what_was_written_late(
    host: GpuHost, rank: str, request: pytest.FixtureRequest
) -> None:
    engine = host.engine
    for seed, old, delay_s in late(200, request):
        engine.ask("write", rank=rank, seed=old, chunks=CHUNKS, at=0)
        event = engine.ask("write", rank=rank, seed=seed, chunks=CHUNKS, at=0, delay_s=delay_s)
        storing = engine.ask("store", rank=rank, seed=seed, chunks=CHUNKS, at=0, event=event)
        was_late = not engine.ask("is_done", request=storing)
        assert engine.ask("done", request=storing)["stored"] == 4
        engine.ask("done", request=engine.ask("load", rank=rank, seed=seed, chunks=CHUNKS, at=8))
        assert engine.ask("holds", rank=rank, seed=seed, chunks=CHUNKS, at=8)
        if was_late:
            return


def test_a_load_after_a_late_event_comes_after_the_engines_own_work(
    host: GpuHost, rank: str, request: pytest.FixtureRequest
) -> None:
    engine = host.engine
    for seed, other, delay_s in late(210, request):
        engine.ask("write", rank=rank, seed=seed, chunks=CHUNKS, at=0)
        engine.ask("done", request=engine.ask("store", rank=rank, seed=seed, chunks=CHUNKS, at=0))
        event = engine.ask("write", rank=rank, seed=other, chunks=CHUNKS, at=8, delay_s=delay_s)
        loading = engine.ask("load", rank=rank, seed=seed, chunks=CHUNKS, at=8, event=event)
        was_late = not engine.ask("is_done", request=loading)
        assert engine.ask("done", request=loading)["loaded"] == 4
        assert engine.ask("holds", rank=rank, seed=seed, chunks=CHUNKS, at=8)  # and not what was written late
        if was_late:
            return


def test_blocks_are_safe_to_overwrite_the_moment_they_are_gathered(
    host: GpuHost, rank: str, request: pytest.FixtureRequest
) -> None:
    engine, (seed, _) = host.engine, seeds(220, request)
    chunks = [0, 8]
    engine.ask("write", rank=rank, seed=seed, chunks=chunks, at=0)
    storing = engine.ask("store", rank=rank, seed=seed, chunks=chunks, at=0, kept="overwrite")
    assert engine.ask("done", request=storing)["stored"] == 8
    assert not engine.ask("holds", rank=rank, seed=seed, chunks=chunks, at=0)
    assert engine.ask("done", request=engine.ask("load", rank=rank, seed=seed, chunks=chunks, at=8))["loaded"] == 8
    assert engine.ask("holds", rank=rank, seed=seed, chunks=chunks, at=8)


def test_blocks_that_were_not_kept_are_not_stored(host: GpuHost, rank: str, request: pytest.FixtureRequest) -> None:
    engine, (seed, _) = host.engine, seeds(230, request)
    engine.ask("write", rank=rank, seed=seed, chunks=CHUNKS, at=0)
    storing = engine.ask("store", rank=rank, seed=seed, chunks=CHUNKS, at=0, kept="no")
    assert set(engine.ask("done", request=storing)["failed"]) == {"0", "1", "2", "3"}
    assert engine.ask("match", rank=rank, seed=seed, chunk_count=4) == 0
    eventually_sync(lambda: not host.cluster.leases())


def test_a_cancelled_store_that_waits_for_a_late_event_ends_at_once(
    host: GpuHost, rank: str, request: pytest.FixtureRequest
) -> None:
    engine = host.engine
    for seed, other, delay_s in late(240, request):
        event = engine.ask("write", rank=rank, seed=other, chunks=CHUNKS, at=0, delay_s=delay_s)
        storing = engine.ask("store", rank=rank, seed=seed, chunks=CHUNKS, at=0, event=event)
        engine.ask("cancel", request=storing)
        outcome = engine.ask("done", request=storing)
        if outcome["stored"] == 4:
            continue  # it was not cancelled in time
        assert set(outcome["failed"]) == {"0", "1", "2", "3"}
        # Its blocks are the engine's own again, and its slots are back.
        engine.ask("write", rank=rank, seed=seed, chunks=CHUNKS, at=4)
        assert engine.ask("done", request=engine.ask("store", rank=rank, seed=seed, chunks=CHUNKS, at=4))["stored"] == 4
        eventually_sync(lambda: not host.cluster.leases())
        return
