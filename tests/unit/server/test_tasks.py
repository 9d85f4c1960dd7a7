"""No crash of a background task goes unseen."""

import asyncio
import os
import threading

import pytest

from kvpool.core.errors import Draining, Overloaded
from kvpool.testing import eventually
from kvpool_server.tasks import BackgroundTasks, BoundedExecutor
from tests.fixtures.patience import PATIENCE_S


async def crash() -> None:
    raise OSError("worker died")


async def test_fatal_crash_is_propagated_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[BaseException] = []
    async with BackgroundTasks(failures.append) as tasks:
        tasks.start(crash(), name="writer")
        await eventually(lambda: failures)
    assert str(failures[0]) == "worker died"
    assert "background task writer crashed" in caplog.text


async def test_other_crash_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[BaseException] = []
    async with BackgroundTasks(failures.append) as tasks:
        tasks.start(crash(), name="sweep", fatal=False)
        await eventually(lambda: "sweep crashed" in caplog.text)
        assert len(tasks) == 0
    assert failures == []


async def test_leaving_cancels_and_waits() -> None:
    cleaned: list[str] = []
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # cleanup that awaits is waited for
            cleaned.append("work")

    failures: list[BaseException] = []
    async with BackgroundTasks(failures.append) as tasks:
        tasks.start(work(), name="work")
        await started.wait()
    assert cleaned == ["work"] and failures == [] and len(tasks) == 0


async def test_fatal_task_cancelled_from_outside_counts_as_crashed() -> None:
    failures: list[BaseException] = []
    async with BackgroundTasks(failures.append) as tasks:
        task = tasks.start(asyncio.Event().wait(), name="loop")  # type: ignore[arg-type]  # its True is not used
        task.cancel()
        await eventually(lambda: failures)
    assert "loop was cancelled" in str(failures[0])


async def test_crash_during_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("cleanup failed")

    async with BackgroundTasks(lambda error: None) as tasks:
        tasks.start(work(), name="work")
        await started.wait()
    assert "cleanup failed" in caplog.text


async def test_nothing_starts_after_close() -> None:
    tasks = BackgroundTasks(lambda error: None)
    await tasks.close()
    with pytest.raises(RuntimeError, match="closed"):
        tasks.start(crash(), name="late")


async def test_runs_off_the_loop_and_hands_results_and_errors_back() -> None:
    executor = BoundedExecutor("disk", threads=1, queue_limit=0)
    assert await executor.run(threading.get_ident) != threading.get_ident()
    assert await executor.run(int, "12", base=16) == 18
    with pytest.raises(ValueError, match="invalid literal"):
        await executor.run(int, "x")
    await executor.close()


async def test_full_queue_refuses() -> None:
    gate = threading.Event()
    executor = BoundedExecutor("disk", threads=1, queue_limit=1)
    waiting = [asyncio.ensure_future(executor.run(gate.wait, 10)) for _ in range(2)]
    await eventually(lambda: executor.pending_count == 2)
    assert executor.is_full
    with pytest.raises(Overloaded, match="disk"):
        await executor.run(int)
    gate.set()
    assert await asyncio.gather(*waiting) == [True, True]
    assert await executor.run(int) == 0
    await executor.close()


async def test_cancelled_caller_does_not_lose_the_call() -> None:
    gate, done = threading.Event(), threading.Event()
    executor = BoundedExecutor("disk", threads=1, queue_limit=1)
    running = asyncio.ensure_future(executor.run(gate.wait, 10))
    queued = asyncio.ensure_future(executor.run(done.set))
    await eventually(lambda: executor.pending_count == 2)
    queued.cancel()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert executor.pending_count == 2 and not done.is_set()
    gate.set()
    await executor.close()
    assert done.is_set() and executor.pending_count == 0


async def test_error_without_a_caller_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    def fail() -> None:
        gate.wait(PATIENCE_S)
        raise OSError("disk on fire")

    executor = BoundedExecutor("disk", threads=1, queue_limit=0)
    caller = asyncio.ensure_future(executor.run(fail))
    await eventually(lambda: executor.pending_count == 1)
    caller.cancel()
    await asyncio.wait([caller])
    gate.set()
    await executor.close()
    assert "disk on fire" in caplog.text and "after its caller had left" in caplog.text


async def test_closed_executor_refuses() -> None:
    executor = BoundedExecutor("disk", threads=1, queue_limit=0)
    await executor.close()
    await executor.close()
    with pytest.raises(Draining):
        await executor.run(int)


async def test_threads_of_a_nice_executor_leave_the_cpu_to_others() -> None:
    nice, plain = (BoundedExecutor("x", threads=1, queue_limit=0, niceness=one) for one in (7, 0))

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    here = niceness()
    assert await plain.run(niceness) == here
    assert await nice.run(niceness) == 7
    assert niceness() == here, "the threads alone"
    await nice.close()
    await plain.close()
