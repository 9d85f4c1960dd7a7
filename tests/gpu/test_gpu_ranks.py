"""Ranks of one model on their own GPUs, and engines and agents that number GPUs differently."""

from __future__ import annotations

import pytest

from kvpool.core.grid import ShardGrid
from kvpool.testing import eventually_sync
from tests.fixtures.gpu_cluster import EngineFailure, GpuHost
from tests.fixtures.gpu_engine_cache import SPECS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

CHUNKS = [0, 4]
SEED = 300


def test_a_chunk_counts_as_stored_when_every_rank_has_committed(host: GpuHost) -> None:
    """TP=2 in two processes with an agent each; rank 1 is slow."""
    cluster, fast, slow = host.cluster, host.engine, host.neighbour
    own = fast.ask("open", rank="tp0", shape="vllm nhd", endpoint=host.endpoint(), device="cuda:0", heads=[0, 4])
    device = f"cuda:{host.second_gpu}"
    other = slow.ask("open", rank="tp1", shape="vllm hnd", endpoint=host.endpoint("rank1"), device=device, heads=[4, 8])
    assert own["shards"] & other["shards"] == 0
    grid = ShardGrid.of(SPECS["plain"])
    assert grid.covers(own["shards"] | other["shards"], grid.all_shards)
    hashes = fast.ask("hashes", rank="tp0", seed=SEED, chunk_count=4)
    assert hashes == slow.ask("hashes", rank="tp1", seed=SEED, chunk_count=4)

    event = slow.ask("write", rank="tp1", seed=SEED, chunks=CHUNKS, at=0, delay_s=3.0)
    storing = slow.ask("store", rank="tp1", seed=SEED, chunks=CHUNKS, at=0, event=event)
    fast.ask("write", rank="tp0", seed=SEED, chunks=CHUNKS, at=0)
    assert fast.ask("done", request=fast.ask("store", rank="tp0", seed=SEED, chunks=CHUNKS, at=0))["stored"] == 4
    eventually_sync(lambda: cluster.matched(own["keyspace"], hashes, own["shards"]) == 4, 2.0)
    assert cluster.matched(own["keyspace"], hashes) == 0
    assert fast.ask("match", rank="tp0", seed=SEED, chunk_count=4) == 4  # of its own shards
    assert not slow.ask("is_done", request=storing)

    assert slow.ask("done", request=storing)["stored"] == 4
    eventually_sync(lambda: cluster.matched(own["keyspace"], hashes) == 4, 5)
    # One rank that has all heads finds both halves.
    fast.ask("open", rank="tp", shape="sglang", endpoint=host.endpoint(), device="cuda:0")
    assert fast.ask("match", rank="tp", seed=SEED, chunk_count=4) == 4
    assert fast.ask("done", request=fast.ask("load", rank="tp", seed=SEED, chunks=CHUNKS, at=5))["loaded"] == 4
    assert fast.ask("holds", rank="tp", seed=SEED, chunks=CHUNKS, at=5)
    assert fast.ask("close", rank="tp")
    assert fast.ask("close", rank="tp0")
    assert slow.ask("close", rank="tp1")


def test_a_gpu_that_the_agent_does_not_see_is_refused_by_its_uuid(host: GpuHost) -> None:
    """The agent of rank 1 sees one GPU, as its device 0. With a single GPU here both are the same, and it serves."""
    uuid = host.engine.ask("devices")["uuids"][0]
    arguments = {"rank": "stray", "shape": "mla", "endpoint": host.endpoint("rank1"), "device": "cuda:0"}
    if host.gpu_count == 1:
        assert host.engine.ask("open", **arguments)["device"] == "cuda"
        assert host.engine.ask("close", rank="stray")
        return
    with pytest.raises(EngineFailure, match=f"INVALID_REQUEST: device {uuid} is not visible to this process"):
        host.engine.ask("open", **arguments)
