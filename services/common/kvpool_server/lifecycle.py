"""The life of a service process: start, stop on a signal, bounded drain, exit code.

Exit codes: 0 stopped as asked; 1 crashed, or did not drain in time; 2 could not start (one line on stderr says why
and what to do); 128 + n ended at once by a second signal n.

The ready file says which ports a service took, and that it serves: a JSON object with at least `pid`, `endpoint`
(host:port of the control service) and `metrics_url`; services may add more. It appears whole or not at all.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from kvpool.core.errors import StartupFailed
from kvpool_server.faults import arm_faults
from kvpool_server.process import fast_loop_factory

_log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_CRASHED: Final = 1
EXIT_STARTUP_FAILED: Final = 2
# What cleanup may take once a drain was cut off; after that, threads that never return are left behind.
_CLEANUP_GRACE_S: Final = 5.0


class Stop:
    """The wish that the service ends, made by a signal or by the failure of something it cannot live without."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """What ended the service; None after a signal."""
        return self._failure

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        """Ask for an orderly end. Idempotent. Call on the event loop."""
        self._event.set()

    def fail(self, error: BaseException) -> None:
        """Ask for an end because of `error` (the first one is kept); the exit code will be 1."""
        if self._failure is None:
            self._failure = error
        self._event.set()

    async def wait(self) -> None:
        """Return once an end was asked for."""
        await self._event.wait()


def run_service(main: Callable[[Stop], Awaitable[None]], *, service: str, grace_s: float = 60.0) -> int:
    """Run `main` on a fresh event loop until it returns, and give the process's exit code.

    SIGTERM or SIGINT set the Stop; `main` then drains and returns. After `grace_s` it is cancelled; should even its
    cleanup hang, the process ends itself. A second signal ends the process at once.
    """
    try:
        arm_faults(os.environ)
        with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
            return runner.run(_run(main, grace_s))
    except StartupFailed as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"kvpool-{service}: {line}\n")
        sys.stderr.flush()
        return EXIT_STARTUP_FAILED
    except Exception:
        _log.critical("the service crashed", exc_info=True)
        return EXIT_CRASHED


async def _run(main: Callable[[Stop], Awaitable[None]], grace_s: float) -> int:
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop, number)
    work = asyncio.ensure_future(_exit_code(main, stop))
    asked = loop.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done() and not await _drained(work, grace_s):
            return EXIT_CRASHED
        code = await work
    finally:
        asked.cancel()
    if stop.failure is not None:
        _log.critical("the service ended by a failure", exc_info=stop.failure)
        return EXIT_CRASHED
    return code


async def _exit_code(main: Callable[[Stop], Awaitable[None]], stop: Stop) -> int:
    """Run `main`. Its SystemExit is that of `--help`; out of a task it would leave with a complaint of asyncio's."""
    try:
        await main(stop)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else EXIT_OK
    return EXIT_OK


async def _drained(work: "asyncio.Future[int]", grace_s: float) -> bool:
    """Whether `work` ended within the grace; it is cancelled when not."""
    await asyncio.wait({work}, timeout=grace_s)
    if work.done():
        return True
    _log.error("not drained after %.1f s; cutting off what still runs", grace_s)
    # A thread that hangs in a system call would keep the interpreter from exiting for ever.
    watchdog = threading.Timer(_CLEANUP_GRACE_S, _exit_now, args=(EXIT_CRASHED,))
    watchdog.daemon = True
    watchdog.start()
    work.cancel()
    await asyncio.wait({work})
    return False


def _on_signal(stop: Stop, number: signal.Signals) -> None:
    if stop.is_set():
        _log.warning("second signal: ending at once")
        _exit_now(128 + number)
    _log.info("stopping on %s", number.name)
    stop.set()


def _exit_now(code: int) -> None:
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def clear_ready_file(path: Path | None) -> None:
    """Remove what an earlier run left, so that it is not taken for ours. Call before anything else is started."""
    if path is None:
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StartupFailed(f"cannot replace ready file {path}: {error.strerror}; configure another path") from error


def write_ready_file(path: Path | None, **values: str | int) -> None:
    """Publish the values and this process's id. Nothing happens without a path. Raises StartupFailed."""
    if path is None:
        return
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        hidden.write_text(json.dumps({"pid": os.getpid(), **values}, indent=1) + "\n", encoding="utf-8")
        hidden.replace(path)
    except OSError as error:
        raise StartupFailed(f"cannot write ready file {path}: {error.strerror}; configure another path") from error
