"""What an agent on the CPU answers with UNIMPLEMENTED, each with a line that says what to do."""

from __future__ import annotations

import pytest

from kvpool.client.cache_loan import CacheLoan
from kvpool.client.gpuagent_control import AgentControl
from kvpool.core.errors import InvalidRequest, NotServed, SessionUnknown
from kvpool.v1 import gpuagent_pb2
from tests.fixtures.agent import CLIENT, EngineProcess, World, running_agent
from tests.fixtures.gpu_agent import DEVICE_UUID
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.raw_engine import raw_engine

CUDA = gpuagent_pb2.CudaIpcHandle(device_uuid=DEVICE_UUID, handle=b"h" * 64, allocation_bytes=1 << 30)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            "cuda handle",
            r"handles\[0\] is a CUDA IPC handle.*register shared memory, or start the agent with --device cuda",
        ),
        ("events", "events are those of CUDA devices.*leave `events` empty"),
    ],
)
async def test_registrations_that_are_not_served(change: str, named: str) -> None:
    world = World()
    async with running_agent(world) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            register = gpuagent_pb2.EngineRegister()
            register.MergeFrom(raw.registration(engine))
            if change == "cuda handle":
                for handle in register.handles:
                    handle.cuda_ipc.CopyFrom(CUDA)
            else:
                register.events.add(device_uuid=DEVICE_UUID, handle=b"e" * 64)
            await raw.send(1, register=register)
            error = await raw.end()
            assert isinstance(error, NotServed)
            with pytest.raises(NotServed, match=named):
                raise error
        assert world.index.opened == []
        engine.close()


async def test_a_session_without_events_refuses_them_and_goes_on() -> None:
    event = gpuagent_pb2.EngineEvent(slot=0, generation=1)
    async with running_agent(World()) as agent:
        engine = EngineProcess(agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            await raw.ready(engine)
            await raw.send(2, event_recorded=event)
            with pytest.raises(InvalidRequest, match="event slot 0 does not exist; 0 events were registered"):
                raise await raw.refusal()
            await raw.send(3, store=gpuagent_pb2.EngineStoreRequest(after=event))
            with pytest.raises(InvalidRequest, match="event slot 0 does not exist"):
                raise await raw.refusal()
            await raw.send(4, match=gpuagent_pb2.EngineMatchRequest())
            assert (await raw.next("match")).matched_chunks == 0
        engine.close()


async def test_caches_are_shared_on_the_unix_socket_alone() -> None:
    """An answer names sessions and memory: over TCP it would go to other users of the host, and to other hosts."""
    async with running_agent(World()) as agent:
        for endpoint, refusal in ((agent.endpoint, SessionUnknown), (agent.tcp_endpoint, NotServed)):
            with pytest.raises(refusal):
                await CacheLoan.open(endpoint, b"s" * 16, b"k" * 16, CLIENT, timeout_s=PATIENCE_S)
        local, remote = (AgentControl(endpoint, CLIENT) for endpoint in (agent.endpoint, agent.tcp_endpoint))
        assert await local.find_cached_chunks(b"k" * 16, b"h" * 16, b"", timeout_s=PATIENCE_S) == []
        with pytest.raises(NotServed, match="unix socket"):
            await remote.find_cached_chunks(b"k" * 16, b"h" * 16, b"", timeout_s=PATIENCE_S)
        await local.close()
        await remote.close()
