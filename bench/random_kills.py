"""What do engines notice when any process of a cluster is killed at random?

Real processes: a Redis, two index replicas, two hosts with a pagestore and an agent each (CPU device). Three engines,
each a process of its own, match, load, compute and store prompts of one set without a pause and compare every loaded
byte. Meanwhile one process after the other is killed with SIGKILL and started again, or stopped for 1 to 3 s, also
while it starts or others are down.

Everything an engine waits for is timed: match, load, store (until it has begun), wait (until blocks may be used again),
report (the end of a store). No call may take longer than 5 s, no byte may be wrong, and a call that fails must
say so as a miss: exit code 1 otherwise. Calls over 2 s are listed with what was killed or stopped in the 15 s before,
where the engine waited, and what the services logged meanwhile.

Run: python -m bench.random_kills [--kills 20] [--seed 1] [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.match_rig import percentile
from kvpool.client.config import ClientConfig
from kvpool.client.pool import AsyncPool
from kvpool.core.errors import KvPoolError, PageCorrupt
from tests.e2e.service_processes import Process
from tests.fixtures.agent import SPEC, EngineProcess
from tests.fixtures.redis_server import RedisServer, free_port, running_redis

T = TypeVar("T")

ENGINES = ("a", "a", "b")  # hosts
PROMPTS, CHUNKS = 150, 12  # all together several times what staging holds
SLOW_S, LIMIT_S, HUNG_S = 2.0, 5.0, 60.0
UP_S, DOWN_S, STOPPED_S = (0.3, 4.5), (0.0, 2.0), (1.0, 3.0)
STOPS = 0.2  # share of stops instead of kills
BEFORE_S = 15.0  # disturbances so long before a slow call belong to it
KINDS = ("match", "load", "store", "wait", "report")
_UNCLEAN = ("INTERNAL", PageCorrupt.reason)


@dataclass(kw_only=True)
class SlowCall:
    """A call over SLOW_S."""

    kind: str
    engine: int
    began_s: float  # of the clock that all processes of the machine share
    took_s: float
    answer: str
    waited_in: str = ""
    before: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Seen:
    """What one engine saw."""

    took_s: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    answers: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    slow: list[SlowCall] = field(default_factory=list)


class Engine:
    """One engine: prompts in random order until it is ended."""

    def __init__(self, number: int, endpoint: str, seed: int) -> None:
        self._number = number
        self._random = random.Random(seed)
        self._memory = EngineProcess(endpoint, chunk_count=CHUNKS, engine_name=f"engine-{number}")
        self.seen = Seen()

    async def run(self, started: Semaphore, ended: Event) -> None:
        pool = await AsyncPool.open(self._memory.plan, ClientConfig())
        started.release()
        while not ended.is_set():
            try:
                await self._prompt(pool)
            except Exception as error:  # the pool promises to raise nothing
                self.seen.counts["failed_calls"] += 1
                self.seen.answers[f"raised {error!r}"[:200]] += 1
            if not pool.connected:
                await asyncio.sleep(0.02)
        await pool.close()

    async def _prompt(self, pool: AsyncPool) -> None:
        memory, seen = self._memory, self.seen
        number = int(self._random.random() ** 2 * PROMPTS)
        tokens = np.random.default_rng(number).integers(0, 1 << 30, CHUNKS * SPEC.chunk_tokens, dtype=np.uint32)
        chain, blocks = pool.prompt(tokens), memory.blocks.reshape(-1)
        found = await self._timed("match", pool.match(chain))
        self._note("match", found.error)
        loaded = 0
        if found.matched_chunks:
            memory.clear()
            loading = await pool.start_load(
                chain, blocks, first_chunk=0, end_chunk=found.matched_chunks, by_layer=False
            )
            report = await self._timed("load", loading.result())
            self._note("load", report.error)
            loaded = report.loaded_chunks
            if not loading.released:
                await self._timed("wait", loading.wait_released())
            seen.counts["loaded_chunks"] += loaded
            seen.counts["wrong_chunks"] += sum(not memory.holds(chain, [chunk], at=chunk) for chunk in range(loaded))
        if loaded == CHUNKS:
            return
        memory.compute(chain, range(loaded, CHUNKS), at=loaded)
        storing = await self._timed("store", pool.store(chain, blocks, first_chunk=loaded, end_chunk=CHUNKS))
        await self._timed("wait", storing.wait_released())
        stored = await self._timed("report", storing.result())
        seen.counts["stored_chunks"] += stored.stored_chunks
        for error in set(stored.failed_chunks.values()):
            self._note("store", error)

    def _note(self, kind: str, error: KvPoolError | None) -> None:
        if error is not None:
            self.seen.answers[f"{kind} {error.reason}"] += 1
            self.seen.counts["failed_calls"] += error.reason in _UNCLEAN

    async def _timed(self, kind: str, call: Coroutine[Any, Any, T]) -> T:
        began_s = time.time()
        task = asyncio.ensure_future(call)
        waited_in, answer = "", "hung"
        try:
            done, _ = await asyncio.wait((task,), timeout=SLOW_S)
            if not done:
                waited_in = _awaits(call)
                done, _ = await asyncio.wait((task,), timeout=HUNG_S)
            if not done:
                task.cancel()
                raise TimeoutError(f"{kind} hung")
            answer = _says(task.exception() or task.result())
            return task.result()
        finally:
            took_s = time.time() - began_s
            self.seen.took_s[kind].append(took_s)
            if took_s > SLOW_S:
                self.seen.slow.append(
                    SlowCall(
                        kind=kind,
                        engine=self._number,
                        began_s=began_s,
                        took_s=round(took_s, 2),
                        answer=answer,
                        waited_in=waited_in,
                    )
                )


def _says(answer: object) -> str:
    error = getattr(answer, "error", None) or next(iter(getattr(answer, "failed_chunks", None) or ()), None)
    if isinstance(failed := getattr(answer, "failed_chunks", None), dict) and failed:
        error = next(iter(failed.values()))
    return repr(error if isinstance(error, KvPoolError) else type(answer).__name__)


def _awaits(call: Awaitable[Any]) -> str:
    """The functions that wait for each other, outermost first."""
    names: list[str] = []
    at: Any = call
    while (frame := getattr(at, "cr_frame", None)) is not None:
        names.append(f"{at.__qualname__}:{frame.f_lineno}")
        at = at.cr_await
    return " > ".join(names)


def play_engine(number: int, endpoint: str, seed: int, started: Semaphore, ended: Event, out: Path) -> None:
    """Process of one engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = Engine(number, endpoint, seed)
    asyncio.run(engine.run(started, ended))
    seen = vars(engine.seen) | {"slow": [vars(call) for call in engine.seen.slow]}
    out.write_text(json.dumps(seen))


class Cluster:
    """All services; a name for each. They are as patient with each other as they are by default."""

    def __init__(self, directory: Path, shm: Path, redis: RedisServer) -> None:
        self._directory, self._shm, self.redis = directory, shm, redis
        self.services: dict[str, Process] = {}

    def start(self) -> None:
        """Returns when all serve."""
        ports = [free_port(), free_port()]
        endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
        for number, port in enumerate(ports):
            self._add(f"index-{number}", "kvpool_index", "--listen", f"127.0.0.1:{port}", "--lease-ttl-ms", "15000")
        for host in "ab":
            self._add(
                f"pagestore-{host}",
                "kvpool_pagestore",
                *("--listen", "127.0.0.1:0", "--bulk-listen", "127.0.0.1:0", "--host-id", host),
                *("--index-endpoints", endpoints, "--socket", str(self._socket(f"{host}.store"))),
                *("--session-dir", str(self._shm), "--arena-bytes", str(64 << 20), "--segment-bytes", str(8 << 20)),
                *("--disk-bytes", str(256 << 20)),
            )
        for host in "ab":
            self._add(
                f"agent-{host}",
                "kvpool_gpuagent",
                *("--index-endpoints", endpoints, "--socket", str(self._socket(f"{host}.agent")), "--host-id", host),
                *("--pagestore-socket", str(self._socket(f"{host}.store"))),
            )
        for process in self.services.values():
            process.wait_ready()

    def engine_endpoint(self, host: str) -> str:
        return f"unix:{self._socket(f'{host}.agent')}"

    def kill_all(self) -> None:
        for process in self.services.values():
            process.kill()

    def logs(self) -> Iterator[tuple[str, str]]:
        """Lines with the names of who wrote them, without the paths of this run."""
        for name, process in self.services.items():
            for line in process.log().splitlines():
                yield name, line.replace(str(self._directory), "DATA").replace(str(self._shm), "SHM")

    def _add(self, name: str, module: str, *flags: str) -> None:
        directory = self._directory / name
        data = () if module == "kvpool_index" else ("--data-dir", str(directory / "data"))
        variables = {"KVPOOL_INDEX_REDIS_URL": self.redis.url} if module == "kvpool_index" else {}
        self.services[name] = Process(module, directory, *data, *flags, variables=variables)
        self.services[name].wait_ready()

    def _socket(self, name: str) -> Path:
        return self._shm / name


@dataclass(frozen=True, slots=True)
class Disturbance:
    """At `at_s` a process was killed, stopped, ..."""

    at_s: float
    what: str


class Nemesis:
    """Kills and stops one process after the other."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster, self._random = cluster, random.Random(seed)
        self.done: list[Disturbance] = []
        self.counts: Counter[str] = Counter()

    def run(self, kills: int, ends_at_s: float) -> None:
        """Until so many were killed, or until a time on the monotonic clock. Restarts may still be under way then."""
        waking: list[threading.Thread] = []
        while self.counts["kills"] < kills and time.monotonic() < ends_at_s:
            time.sleep(self._random.uniform(*UP_S))
            waking = [thread for thread in waking if thread.is_alive()]
            busy = {thread.name for thread in waking}
            name = self._random.choice([one for one in ("redis", *self._cluster.services) if one not in busy])
            stops = self._random.random() < STOPS
            pause_s = self._random.uniform(*(STOPPED_S if stops else DOWN_S))
            self.counts["stops" if stops else "kills"] += 1
            self.counts[f"{name} {'stopped' if stops else 'killed'}"] += 1
            thread = threading.Thread(target=self._stop if stops else self._kill, args=(name, pause_s), name=name)
            thread.start()
            waking.append(thread)
        for thread in waking:
            thread.join()

    def _kill(self, name: str, pause_s: float) -> None:
        target = self._cluster.redis if name == "redis" else self._cluster.services[name]
        self._note(f"{name} killed")
        target.kill()
        time.sleep(pause_s)
        target.start()
        self._note(f"{name} started")

    def _stop(self, name: str, pause_s: float) -> None:
        redis = self._cluster.redis
        pid = redis.pid if name == "redis" else self._cluster.services[name].pid
        self._note(f"{name} stopped for {pause_s:.1f} s")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(pause_s)
        os.kill(pid, signal.SIGCONT)

    def _note(self, what: str) -> None:
        self.done.append(Disturbance(time.time(), what))


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Everything is killed, and removed from shared memory, when the block ends."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-kills-")))
        shm = Path(tempfile.mkdtemp(prefix="kvpool-kills-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, shm, ignore_errors=True)
        cluster = Cluster(directory, shm, stack.enter_context(running_redis(persist=True)))
        stack.callback(cluster.kill_all)
        cluster.start()
        yield cluster


def run(kills: int, seed: int, minutes: float) -> dict[str, Any]:
    """One run; see the module."""
    spawn = multiprocessing.get_context("spawn")
    load_before = os.getloadavg()
    with running_cluster() as cluster, tempfile.TemporaryDirectory() as out:
        started, ended = spawn.Semaphore(0), spawn.Event()
        files = [Path(out) / f"{number}.json" for number in range(len(ENGINES))]
        engines = [
            spawn.Process(
                target=play_engine,
                args=(number, cluster.engine_endpoint(host), seed * 1000 + number, started, ended, files[number]),
                daemon=True,
            )
            for number, host in enumerate(ENGINES)
        ]
        for engine in engines:
            engine.start()
        for _ in engines:
            if not started.acquire(timeout=HUNG_S):
                raise TimeoutError("an engine did not start")
        nemesis = Nemesis(cluster, seed)
        began_s = time.monotonic()
        nemesis.run(kills, began_s + minutes * 60)
        took_s = time.monotonic() - began_s
        time.sleep(LIMIT_S)  # calls that the last one holds up
        ended.set()
        for engine in engines:
            engine.join(2 * HUNG_S)
        seen = [json.loads(file.read_text()) for file in files if file.exists()]
        slow = [_explained(SlowCall(**call), nemesis, cluster) for one in seen for call in one["slow"]]
    counts = sum((Counter(one["counts"]) for one in seen), Counter[str]())
    took = {kind: [s for one in seen for s in one["took_s"][kind]] for kind in KINDS}
    return {
        "seed": seed,
        "kills": nemesis.counts["kills"],
        "stops": nemesis.counts["stops"],
        "seconds": round(took_s),
        "load_average_before_and_after": [round(load_before[0], 1), round(os.getloadavg()[0], 1)],
        "disturbances": dict(sorted((k, v) for k, v in nemesis.counts.items() if " " in k)),
        "engines_that_ended": len(seen),
        "wrong_chunks": counts["wrong_chunks"],
        "failed_calls": counts["failed_calls"],
        "loaded_chunks": counts["loaded_chunks"],
        "stored_chunks": counts["stored_chunks"],
        "calls": {kind: _figures(samples) for kind, samples in took.items()},
        "calls_over_5_s": sum(s > LIMIT_S for samples in took.values() for s in samples),
        "misses": dict(sum((Counter(one["answers"]) for one in seen), Counter[str]()).most_common()),
        "slow": sorted((vars(call) for call in slow), key=lambda call: -call["took_s"]),
    }


def _figures(samples: list[float]) -> dict[str, float]:
    if not samples:
        return {"count": 0}
    return {
        "count": len(samples),
        "p50_ms": round(1e3 * percentile(samples, 50), 1),
        "p99_ms": round(1e3 * percentile(samples, 99), 1),
        "max_s": round(max(samples), 2),
        "over_2_s": sum(s > SLOW_S for s in samples),
    }


def _explained(call: SlowCall, nemesis: Nemesis, cluster: Cluster) -> SlowCall:
    """The call with what happened around it, seconds from its beginning."""
    ends_s = call.began_s + call.took_s
    for one in sorted(nemesis.done, key=lambda one: one.at_s):
        if call.began_s - BEFORE_S <= one.at_s <= ends_s:
            call.before.append(f"{one.at_s - call.began_s:+.1f} {one.what}")
    logged: list[tuple[float, str]] = []
    for name, line in cluster.logs():
        at_s = _logged_at(line)
        if call.began_s - 0.5 <= at_s <= ends_s:
            logged.append((at_s, f"{at_s - call.began_s:+.1f} {name} {line.partition(' ')[2][:240]}"))
    call.logged = [text for _, text in sorted(logged)][:40]
    call.began_s = round(call.began_s, 2)
    return call


def _logged_at(line: str) -> float:
    """Of a logfmt line; 0 if it is none."""
    word = line.partition(" ")[0].rpartition("=")[2]
    try:
        return datetime.fromisoformat(word).timestamp()
    except ValueError:
        return 0.0


def about() -> dict[str, object]:
    """What it was measured on."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": "virtual machine, shared with other work",
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
    }


def main() -> int:
    """Exit code 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=8.0, help="at most")
    parser.add_argument("--out", type=Path, default=None, help="JSON file; a run is added to those in it")
    options = parser.parse_args()
    found = run(options.kills, options.seed, options.minutes)
    print(json.dumps(found, indent=1))
    if options.out is not None:
        runs = json.loads(options.out.read_text())["runs"] if options.out.exists() else []
        options.out.write_text(json.dumps({"about": about(), "runs": [*runs, found]}, indent=1) + "\n")
    broken = found["wrong_chunks"] or found["failed_calls"] or found["calls_over_5_s"]
    return 1 if broken or found["engines_that_ended"] < len(ENGINES) else 0


if __name__ == "__main__":
    sys.exit(main())
