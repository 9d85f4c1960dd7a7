"""GPU memory and events that an agent refuses to map, each by the name of the argument, before anything is opened."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.core.errors import InvalidRequest, NotServed
from kvpool.v1 import gpuagent_pb2
from tests.fixtures.agent import EngineProcess, World, running_agent
from tests.fixtures.gpu_agent import DEVICE_UUID, FakeGpu, FakeGpuDevice, GpuEngine
from tests.fixtures.raw_engine import raw_engine

Register = gpuagent_pb2.EngineRegister


def change_ipc(**changes: object) -> Callable[[Register], None]:
    def change(register: Register) -> None:
        for name, value in changes.items():
            setattr(register.handles[1].cuda_ipc, name, value)

    return change


def change_size(register: Register) -> None:
    register.handles[1].size_bytes = 0


def mix(register: Register) -> None:
    register.handles[1].shared_memory.CopyFrom(gpuagent_pb2.SharedMemoryHandle())


def no_kind(register: Register) -> None:
    register.handles[1].ClearField("kind")


def many_handles(register: Register) -> None:
    register.handles.extend([register.handles[0]] * 4096)


def many_events(register: Register) -> None:
    register.events.extend([register.events[0]] * 1024)


def short_event(register: Register) -> None:
    register.events[1].handle = b"e" * 63


def event_without_device(register: Register) -> None:
    register.events[0].device_uuid = ""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (change_ipc(handle=b"h" * 63), r"handles\[1\]\.handle must be 64 bytes, got 63"),
        (change_ipc(device_uuid="0"), r"handles\[1\]\.device_uuid must be a UUID like GPU-"),
        (change_ipc(device_uuid=DEVICE_UUID + "\n"), r"handles\[1\]\.device_uuid must be"),
        (change_ipc(allocation_offset=-1), r"handles\[1\]\.allocation_offset must be >= 0, got -1"),
        (change_ipc(allocation_bytes=0), r"handles\[1\]\.allocation_bytes must be > 0, got 0"),
        (change_ipc(allocation_offset=1), r"handles\[1\] ends at byte .*but allocation_bytes is"),
        (change_size, r"handles\[1\]\.size_bytes must be"),
        (mix, r"handles\[1\] is of another kind than handles\[0\]"),
        (no_kind, r"handles\[1\] has no kind"),
        (many_handles, "number of handles must be 0 to 4096, got 4100"),
        (many_events, "number of events must be 0 to 1024, got 1026"),
        (short_event, r"events\[1\]\.handle must be 64 bytes, got 63"),
        (event_without_device, r"events\[0\]\.device_uuid must be a UUID"),
    ],
)
async def test_memory_that_does_not_fit_is_refused_naming_the_argument(
    change: Callable[[Register], None], named: str
) -> None:
    world, gpu = World(), FakeGpu()
    async with running_agent(world, device=FakeGpuDevice(gpu)) as agent:
        engine = GpuEngine(gpu, agent.endpoint)
        async with raw_engine(agent.endpoint) as raw:
            register = raw.registration(engine)
            change(register)
            await raw.send(1, register=register)
            error = await raw.end()
            with pytest.raises(InvalidRequest, match=named):
                raise error or AssertionError("it was not refused")
        assert not agent.engine.sessions
        assert world.index.opened == []
        engine.close()


async def test_memory_that_cannot_be_opened_ends_the_session_and_lets_go() -> None:
    gpu = FakeGpu()
    async with running_agent(World(), device=FakeGpuDevice(gpu)) as agent:
        engine = GpuEngine(gpu, agent.endpoint)
        gpu.memory.clear()
        with pytest.raises(InvalidRequest, match=r"handles\[0\] opens nothing"):
            await engine.open()
        assert not agent.engine.sessions
        engine.close()


async def test_each_device_refuses_the_memory_of_the_other() -> None:
    gpu = FakeGpu()
    async with running_agent(World()) as agent:
        engine = GpuEngine(gpu, agent.endpoint)
        with pytest.raises(NotServed, match="register shared memory, or start the agent with --device cuda"):
            await engine.open()
        engine.close()
    async with running_agent(World(), device=FakeGpuDevice(gpu)) as agent:
        shared = EngineProcess(agent.endpoint)
        with pytest.raises(NotServed, match="register CUDA IPC handles"):
            await shared.open()
        shared.close()
