"""Engines that reuse their blocks while streams are late: what is stored is what they wrote before their event."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool.testing import eventually_sync
from tests.fixtures.gpu_cluster import GpuHost

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

CHUNKS = [0, 4]
AGENTS = ["rank0", "rank1"]
DELAY_S = 0.7


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


def test_a_store_after_a_late_event_stores_what_was_written_late(
    host: GpuHost, rank: str, request: pytest.FixtureRequest
) -> None:
    engine, (seed, old) = host.engine, seeds(200, request)
    engine.ask("write", rank=rank, seed=old, chunks=CHUNKS, at=0)
    event = engine.ask("write", rank=rank, seed=seed, chunks=CHUNKS, at=0, delay_s=DELAY_S)
    storing = engine.ask("store", rank=rank, seed=seed, chunks=CHUNKS, at=0, event=event)
    assert not engine.ask("is_done", request=storing)  # or the stream was not late at all
    assert engine.ask("done", request=storing)["stored"] == 4
    engine.ask("done", request=engine.ask("load", rank=rank, seed=seed, chunks=CHUNKS, at=8))
    assert engine.ask("holds", rank=rank, seed=seed, chunks=CHUNKS, at=8)


def test_a_load_after_a_late_event_comes_after_the_engines_own_work(
    host: GpuHost, rank: str, request: pytest.FixtureRequest
) -> None:
    engine, (seed, late) = host.engine, seeds(210, request)
    engine.ask("write", rank=rank, seed=seed, chunks=CHUNKS, at=0)
    engine.ask("done", request=engine.ask("store", rank=rank, seed=seed, chunks=CHUNKS, at=0))
    event = engine.ask("write", rank=rank, seed=late, chunks=CHUNKS, at=8, delay_s=DELAY_S)
    loading = engine.ask("load", rank=rank, seed=seed, chunks=CHUNKS, at=8, event=event)
    assert not engine.ask("is_done", request=loading)
    assert engine.ask("done", request=loading)["loaded"] == 4
    assert engine.ask("holds", rank=rank, seed=seed, chunks=CHUNKS, at=8)  # and not what was written late


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
    engine, (seed, late) = host.engine, seeds(240, request)
    event = engine.ask("write", rank=rank, seed=late, chunks=CHUNKS, at=0, delay_s=DELAY_S)
    storing = engine.ask("store", rank=rank, seed=seed, chunks=CHUNKS, at=0, event=event)
    engine.ask("cancel", request=storing)
    assert set(engine.ask("done", request=storing)["failed"]) == {"0", "1", "2", "3"}
    # Its blocks are the engine's own again, and its slots are back.
    engine.ask("write", rank=rank, seed=seed, chunks=CHUNKS, at=4)
    assert engine.ask("done", request=engine.ask("store", rank=rank, seed=seed, chunks=CHUNKS, at=4))["stored"] == 4
    eventually_sync(lambda: not host.cluster.leases())
