"""No crash of a background task goes unseen."""

import asyncio

import pytest

from kvpool.testing import eventually
from kvpool_server.tasks import BackgroundTasks


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
