"""Runs a service with a watch over its event loop: `python -m bench.loop_watch FILE MODULE [argument ...]`.

A beat on the loop is due every few milliseconds. Each one that comes late is a line of JSON in FILE: how late, how much
of that time the loop's thread had a processor (a thread that the machine did not run stalled nothing itself), and where
the thread was while the beat was overdue, as another thread saw it.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

_BEAT_S = 0.005
_NOTED_S = 0.010
_SEEN_S = 0.030  # an overdue beat's stack is taken
_STACK_FRAMES = 12


@dataclass(frozen=True, slots=True)
class Stall:
    """One late beat; times in seconds, `at_s` since the epoch."""

    at_s: float
    late_s: float
    cpu_s: float
    collecting_s: float  # spent in the garbage collector, whichever thread ran it
    stack: str


def stalls_between(path: Path, begun_s: float, ended_s: float) -> list[Stall]:
    """Stalls that ended within that time."""
    found = [Stall(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    return [one for one in found if begun_s <= one.at_s <= ended_s]


class _Watch:
    def __init__(self, loop: asyncio.AbstractEventLoop, out: TextIO) -> None:
        self._loop = loop
        self._out = out
        self._due_s = 0.0
        self._cpu_s = 0.0
        self._thread_id = threading.get_ident()
        self._stack = ""
        self._collecting_s = self._collection_begun_s = 0.0
        gc.callbacks.append(self._collect)
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._due_s, self._cpu_s = time.perf_counter() + _BEAT_S, time.thread_time()
        self._loop.call_later(_BEAT_S, self._beat)
        threading.Thread(target=self._look, daemon=True).start()

    def _collect(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collection_begun_s = time.perf_counter()
        else:
            self._collecting_s += time.perf_counter() - self._collection_begun_s

    def _beat(self) -> None:
        late_s, cpu_s = time.perf_counter() - self._due_s, time.thread_time() - self._cpu_s
        if late_s >= _NOTED_S:
            line: dict[str, object] = {"at_s": time.time(), "late_s": round(late_s, 4), "cpu_s": round(cpu_s, 4)}
            line |= {"collecting_s": round(self._collecting_s, 4), "stack": self._stack}
            self._out.write(json.dumps(line) + "\n")
            self._out.flush()
        self._stack, self._collecting_s = "", 0.0
        self._due_s, self._cpu_s = time.perf_counter() + _BEAT_S, time.thread_time()
        self._loop.call_later(_BEAT_S, self._beat)

    def _look(self) -> None:
        while True:
            time.sleep(_BEAT_S)
            if not self._stack and time.perf_counter() - self._due_s > _SEEN_S:
                frame: FrameType | None = sys._current_frames().get(self._thread_id)  # noqa: SLF001  # documented
                frames = traceback.extract_stack(frame)[-_STACK_FRAMES:] if frame is not None else []
                self._stack = " > ".join(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in frames)


class _WatchedLoops(asyncio.DefaultEventLoopPolicy):
    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        _Watch(loop, self._out)
        return loop


def main() -> int:
    path, module = sys.argv[1:3]
    sys.argv[1:] = sys.argv[3:]
    with Path(path).open("w") as out:
        asyncio.set_event_loop_policy(_WatchedLoops(out))
        code: int = importlib.import_module(module).main()
    return code


if __name__ == "__main__":
    sys.exit(main())
