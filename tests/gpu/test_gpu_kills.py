"""Processes that are killed in the middle, GPUs that are full, allocators whose memory cannot be shared."""

from __future__ import annotations

import pytest

from kvpool.testing import eventually_sync
from tests.fixtures.gpu_cluster import EngineChild, EngineFailure, GpuHost

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(110)]

CHUNKS = [0, 8]
SLACK_BYTES = 64 << 20  # what an agent may have allocated meanwhile: modules of kernels
LEFT_BYTES = 200 << 20  # the guest's cache, and less than the agent's 256 MiB of scratch


def victim(host: GpuHost, name: str) -> EngineChild:
    """An engine process with a cache of 256 MiB."""
    child = host.cluster.engine(name)
    child.wait_event("started")
    child.ask("open", rank="victim", shape="vllm hnd", endpoint=host.endpoint(), device="cuda:0", chunks=64)
    return child


def names(host: GpuHost, agent: str = "rank0") -> set[str]:
    return {session.engine_name for session in host.cluster.status(agent).sessions}


@pytest.fixture
def survivor(host: GpuHost) -> str:
    """A rank of the main process on the same agent, for the time after."""
    host.engine.ask("open", rank="survivor", shape="vllm nhd", endpoint=host.endpoint(), device="cuda:0")
    return "survivor"


@pytest.mark.parametrize("operation", ["store", "load"])
def test_an_engine_killed_in_the_middle_leaves_neither_mapping_nor_lease(
    host: GpuHost, survivor: str, operation: str
) -> None:
    engine, seed = host.engine, 400 if operation == "store" else 401
    free_bytes = engine.ask("free_bytes", device=0)
    child = victim(host, f"killed in a {operation}")
    child.ask("write", rank="victim", seed=seed, chunks=CHUNKS, at=0)
    if operation == "store":
        child.ask("store", rank="victim", seed=seed, chunks=CHUNKS, at=0, kept="hang")
        child.wait_event("gathered")
    else:
        child.ask("done", request=child.ask("store", rank="victim", seed=seed, chunks=CHUNKS, at=0))
        child.start("load", rank="victim", seed=seed, chunks=CHUNKS, at=8, times=60)
        child.wait_event("progress")
    child.kill()
    eventually_sync(lambda: "victim" not in names(host))
    eventually_sync(lambda: not host.cluster.leases())
    # As long as anybody maps it, its memory is not free.
    eventually_sync(lambda: engine.ask("free_bytes", device=0) >= free_bytes - SLACK_BYTES)

    expected = 8 if operation == "store" else 0  # what it stored before is there; what it did not commit is not
    engine.ask("write", rank=survivor, seed=seed, chunks=CHUNKS, at=0)
    stored = engine.ask("done", request=engine.ask("store", rank=survivor, seed=seed, chunks=CHUNKS, at=0))
    assert (stored["stored"], stored["same"], stored["failed"]) == (expected, 8 - expected, {})
    assert engine.ask("done", request=engine.ask("load", rank=survivor, seed=seed, chunks=CHUNKS, at=8))["loaded"] == 8
    assert engine.ask("holds", rank=survivor, seed=seed, chunks=CHUNKS, at=8)
    assert engine.ask("close", rank=survivor)


def test_an_agent_that_is_killed_does_not_hurt_the_engine(host: GpuHost) -> None:
    """In the middle of loads, with a store waiting for an event: holds end after its process, and a new one serves."""
    engine, agent = host.neighbour, host.cluster.agents["rank0"]
    rank = {"rank": "bereaved"}
    engine.ask("open", **rank, shape="lightllm", endpoint=host.endpoint(), device="cuda:0", chunks=32)
    engine.ask("write", **rank, seed=410, chunks=CHUNKS, at=0)
    engine.ask("write", **rank, seed=411, chunks=CHUNKS, at=16)  # known to the engine only
    assert engine.ask("done", request=engine.ask("store", **rank, seed=410, chunks=CHUNKS, at=0))["stored"] == 8
    event = engine.ask("write", **rank, seed=412, chunks=[0, 4], at=24, delay_s=2.0)
    storing = engine.ask("store", **rank, seed=412, chunks=[0, 4], at=24, event=event)
    loading = engine.ask("load", **rank, seed=410, chunks=CHUNKS, at=8, times=40)
    agent.kill()
    broken = engine.ask("done", request=storing)
    assert broken["reason"] == "SERVICE_UNAVAILABLE", broken
    assert not broken["hold_ended"]  # a second for the driver comes after the end of the process
    engine.ask("wait_hold", request=storing)
    engine.ask("wait_hold", request=loading)
    assert engine.is_alive
    assert engine.ask("compute", device=0)
    assert engine.ask("holds", **rank, seed=411, chunks=CHUNKS, at=16)
    assert engine.ask("holds", **rank, seed=410, chunks=CHUNKS, at=0)
    assert engine.ask("holds", **rank, seed=412, chunks=[0, 4], at=24)

    agent.start()
    agent.wait_ready()
    eventually_sync(lambda: not host.cluster.leases())
    engine.ask("reopen", **rank)
    assert engine.ask("done", request=engine.ask("load", **rank, seed=410, chunks=CHUNKS, at=8))["loaded"] == 8
    assert engine.ask("holds", **rank, seed=410, chunks=CHUNKS, at=8)
    assert engine.ask("done", request=engine.ask("store", **rank, seed=412, chunks=[0, 4], at=24))["stored"] == 4
    assert engine.ask("close", **rank)


def test_memory_of_expandable_segments_is_refused_saying_what_to_set(host: GpuHost) -> None:
    setting = "expandable_segments:True"
    child = host.cluster.engine("expandable", PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting)
    child.wait_event("started")
    with pytest.raises(EngineFailure, match=r"INVALID_REQUEST: tensors\[0\].*expandable_segments:False"):
        child.ask("open", rank="no", shape="vllm nhd", endpoint=host.endpoint(), device="cuda:0")
    child.kill()


@pytest.mark.whole_gpu
def test_a_gpu_without_room_for_the_scratch_is_served_with_less(host: GpuHost) -> None:
    """The agent takes its scratch when the first engine comes; others have left it little."""
    filler, guest = host.engine, host.neighbour
    guest.ask("empty_gpu")
    try:
        assert filler.ask("fill_gpu", device=0, leave_bytes=LEFT_BYTES) < LEFT_BYTES + (32 << 20)
        guest.ask("open", rank="guest", shape="mla", endpoint=host.endpoint("crowded"), device="cuda:0", chunks=8)
        guest.ask("write", rank="guest", seed=421, chunks=[0, 4], at=0)
        assert guest.ask("done", request=guest.ask("store", rank="guest", seed=421, chunks=[0, 4], at=0))["stored"] == 4
        assert guest.ask("done", request=guest.ask("load", rank="guest", seed=421, chunks=[0, 4], at=4))["loaded"] == 4
        assert guest.ask("holds", rank="guest", seed=421, chunks=[0, 4], at=4)
        assert guest.ask("close", rank="guest")
    finally:
        filler.ask("empty_gpu")
    assert "the GPU has no room for 268435456 bytes of scratch" in host.cluster.agents["crowded"].log()
