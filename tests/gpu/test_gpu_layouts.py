"""Caches of real engines' layouts in real GPU memory: what one stores, another one holds bit for bit after a load."""

from __future__ import annotations

import pytest

from tests.fixtures.gpu_cluster import GpuHost
from tests.fixtures.gpu_engine_cache import SHAPES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(110)]

CHUNKS = [0, 4]


def opened(host: GpuHost, rank: str, shape: str, agent: str = "rank0") -> None:
    engine = host.engine
    device = host.second_gpu if agent == "rank1" else 0
    assert engine.ask("open", rank=rank, shape=shape, endpoint=host.endpoint(agent), device=f"cuda:{device}")


@pytest.mark.parametrize("agent", ["rank0", "rank1"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_cache_stored_it_loads_bit_for_bit(host: GpuHost, shape: str, agent: str) -> None:
    """On the first agent by whatever path it chooses, on the second one without scratch, run by run."""
    engine, seed = host.engine, 100 + 20 * ["rank0", "rank1"].index(agent) + list(SHAPES).index(shape)
    opened(host, "one", shape, agent)
    try:
        engine.ask("write", rank="one", seed=seed, chunks=CHUNKS, at=0)
        stored = engine.ask("done", request=engine.ask("store", rank="one", seed=seed, chunks=CHUNKS, at=0))
        assert stored == {"stored": 4, "same": 0, "failed": {}}
        loaded = engine.ask("done", request=engine.ask("load", rank="one", seed=seed, chunks=CHUNKS, at=8))
        assert loaded["loaded"] == 4, loaded
        assert engine.ask("holds", rank="one", seed=seed, chunks=CHUNKS, at=8)
        assert engine.ask("holds", rank="one", seed=seed, chunks=CHUNKS, at=0)
    finally:
        assert engine.ask("close", rank="one")


def test_layouts_of_one_keyspace_read_each_other(host: GpuHost) -> None:
    engine = host.engine
    opened(host, "writer", "vllm nhd")
    readers = [shape for shape in SHAPES if SHAPES[shape].spec == "plain" and shape != "vllm nhd"]
    engine.ask("write", rank="writer", seed=1, chunks=CHUNKS, at=3)
    engine.ask("done", request=engine.ask("store", rank="writer", seed=1, chunks=CHUNKS, at=3))
    for shape in readers:
        opened(host, "reader", shape)
        loaded = engine.ask("done", request=engine.ask("load", rank="reader", seed=1, chunks=CHUNKS, at=1))
        assert loaded["loaded"] == 4, (shape, loaded)
        assert engine.ask("holds", rank="reader", seed=1, chunks=CHUNKS, at=1), shape
        assert engine.ask("close", rank="reader")
    assert engine.ask("close", rank="writer")
