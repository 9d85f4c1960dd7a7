"""Exactly what of the agent's API this version answers with UNIMPLEMENTED, each with a line that says what to do."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from kvpool.core.errors import InvalidRequest, NotServed
from kvpool.v1 import gpuagent_pb2
from kvpool.v1.gpuagent_pb2_grpc import GpuAgentServiceStub
from tests.fixtures.agent import EngineProcess, World, running_agent
from tests.fixtures.gpu_agent import DEVICE_UUID
from tests.fixtures.raw_engine import raw_engine

SERVICE = gpuagent_pb2.DESCRIPTOR.services_by_name["GpuAgentService"]
SERVED = {"EngineSession", "GetAgentStatus"}
CUDA = gpuagent_pb2.CudaIpcHandle(device_uuid=DEVICE_UUID, handle=b"h" * 64, allocation_bytes=1 << 30)


async def test_calls_that_are_not_served() -> None:
    async with running_agent(World()) as agent, grpc.aio.insecure_channel(agent.tcp_endpoint) as channel:
        stub: Any = GpuAgentServiceStub(channel)
        not_served = {}
        for method in SERVICE.methods:
            if method.client_streaming or method.server_streaming:
                continue
            request = getattr(gpuagent_pb2, method.input_type.name)()
            try:
                await getattr(stub, method.name)(request, timeout=5)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNIMPLEMENTED
                not_served[method.name] = error.details()
        assert set(not_served) == {method.name for method in SERVICE.methods} - SERVED == {"PeerPull"}
        assert "load from staging" in (not_served["PeerPull"] or "")


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
