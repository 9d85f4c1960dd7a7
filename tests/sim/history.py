"""One history: a small cluster, its clients, what goes wrong, and whether every promise was kept."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import kvpool.client.endpoints
import kvpool.client.pagestore
import kvpool_pagestore.engine.replication
import kvpool_pagestore.engine.sessions
import kvpool_server.node.reconciler
from kvpool.core import location_digest
from kvpool.core.errors import KvPoolError
from kvpool.core.fault_points import disarm_all
from tests.sim.checks import check_always, check_calm, check_pages, what_is_left
from tests.sim.client_parts import ClientCounts
from tests.sim.clients import ClientNode, Tally
from tests.sim.host import SimSegmentMap
from tests.sim.loop import SimKilled, SimLoop, Violation, current_process
from tests.sim.nemesis import Nemesis
from tests.sim.network import Faults, Network
from tests.sim.nodes import IndexNode, SimClock, World
from tests.sim.pages import OTHER_TENANT, SHARED_HEAD, small_shards
from tests.sim.pagestore_node import SESSION_FDS, PageStoreNode, PageStoreShape
from tests.sim.redis import SimRedis
from tests.sim.watchers import Watcher

_LIMIT_S = 400.0  # virtual, of one history
_SETTLE_S = 60.0  # virtual: within it everything must have come to rest
_SEPARATE_CHAINS = (0, 1, 2)
_CHAINS_OF_ONE_HEAD = tuple(range(SHARED_HEAD, SHARED_HEAD + 5))
_SPLIT_CHUNKS = 3  # of a group, in histories in which groups are split


@dataclass(slots=True)
class Report:
    """What a history did, and what it found."""

    seed: int
    violations: list[str] = field(default_factory=list)
    counts: ClientCounts = field(default_factory=ClientCounts)
    faults: list[str] = field(default_factory=list)
    callbacks: int = 0
    virtual_s: float = 0.0


def run_history(seed: int, trace: Callable[[str], None] | None = None) -> Report:
    """Run the history of a seed. The report's violations are empty if all promises were kept."""
    rng = Random(seed)
    report = Report(seed)
    loop = SimLoop(rng)
    network = Network(loop, rng, _faults(rng))
    slow = rng.random() < 0.1
    if slow:
        network.faults.none()
    chains = _CHAINS_OF_ONE_HEAD if rng.random() < 0.4 else _SEPARATE_CHAINS
    world = World(loop=loop, rng=rng, network=network, redis=_redis(loop, network), chains=chains, only_slow=slow)
    world.copies = 2 if rng.random() < 0.2 else 1
    if trace is not None:
        loop.trace = lambda what: trace(f"{loop.time():9.4f} {what}")
    history = _History(world, report)
    with _seams(world, rng, loop.trace) as unforeseen:
        try:
            loop.run(history.run(), _LIMIT_S)
        except Violation as violation:
            report.violations.append(str(violation))
        except KvPoolError as error:
            report.violations.append(f"the history itself failed: {error!r}")
        finally:
            disarm_all()
            report.violations += [*world.violations, *loop.failures, *network.unforeseen, *unforeseen]
            for store in world.pagestores:
                report.violations += store.host.violations
            report.violations = list(dict.fromkeys(report.violations))
            _tear_down(world)
    report.callbacks, report.virtual_s = loop.callback_count, loop.now_s
    return report


def _tear_down(world: World) -> None:
    """Code of the history's processes unwinds, unheard."""
    logging.disable()
    try:
        world.loop.close()
        for store in world.pagestores:
            store.abandon()
    finally:
        logging.disable(logging.NOTSET)


class _History:
    """The world's own task."""

    def __init__(self, world: World, report: Report) -> None:
        self._world = world
        self._report = report
        self._rng = world.rng
        self._clients: list[ClientNode] = []
        self._watchers: list[Watcher] = []

    async def run(self) -> None:
        world, rng = self._world, self._rng
        self._make_cluster()
        operations = (8 if world.only_slow else 2) + int(rng.random() * 6)
        nemesis = Nemesis(world, self._clients, operations=operations)
        for index in world.indexes:
            index.start()
        for store in world.pagestores:
            store.start()
        for watcher in self._watchers:
            watcher.start()
        await asyncio.sleep(0.2)
        for client in self._clients:
            client.start(operations)
        nemesis_task = asyncio.create_task(nemesis.run(3 if world.only_slow else int(rng.random() * 5), 2.0))
        while not (nemesis_task.done() and self._clients_done()):
            await asyncio.sleep(0.5)
            check_always(world, self._clients)
        nemesis_task.result()
        self._report.faults = nemesis.done
        await self._come_to_rest(nemesis)
        await self._load_everything()
        self._report.counts = Tally(self._clients).total()

    def _make_cluster(self) -> None:
        world, rng = self._world, self._rng
        world.indexes = [IndexNode(world, number) for number in range(1 + int(rng.random() * 2))]
        roomy = world.copies > 1 and rng.random() < 0.8
        for number in range(2 + int(rng.random() * 2)):
            shape = PageStoreShape(
                arena_slots=rng.choice((6, 6, 8, 12)),
                segment_slots=rng.choice((2, 4)),
                disk_pages=64 if roomy else rng.choice((0, 8, 12, 64)),
                wall_offset_s=rng.choice((0.0, 0.0, -30.0, 30.0)),
                linger_ms=rng.choice((5, 5, 200)),
            )
            world.pagestores.append(PageStoreNode(world, number, shape))
        if rng.random() < 0.25:
            world.watch_buffer_events = rng.choice((2, 16, 1024))
            self._watchers = [Watcher(world, f"watcher{int(one)}", is_replica=one) for one in (False, True)]
        if rng.random() < 0.3:
            world.agents = {"client0", "client1"} if rng.random() < 0.5 else {"client0"}
        world.prepares = rng.random() < 0.2
        if rng.random() < 0.25:
            world.tenants["client1"] = OTHER_TENANT
        self._clients += [
            ClientNode(world, f"client{number}", world.pagestores[number % len(world.pagestores)])
            for number in range(2 + int(rng.random() * 2.3))
        ]

    def _clients_done(self) -> bool:
        return all(not client.alive or (client.task is not None and client.task.done()) for client in self._clients)

    async def _come_to_rest(self, nemesis: Nemesis) -> None:
        """No more faults: clients leave, and nothing is left of them within the bound."""
        world = self._world
        for client in self._clients:
            client.leaving = True
            if client.process.kill_at or not client.alive:
                client.crash()
        nemesis.end()
        arrived_s = world.network.last_arrival_s + 0.1  # what was sent slowly is heard
        until_s = world.loop.time() + _SETTLE_S
        while True:
            await asyncio.sleep(0.5)
            nemesis.revive()
            check_always(world, self._clients)
            for client in self._clients:
                if client.alive and client.task is not None and client.task.done():
                    self._raise_failure(client)
                    client.crash()  # the process exits
            left = await what_is_left(world, self._clients)
            if not left and world.loop.time() > arrived_s:
                break
            if world.loop.time() > until_s:
                raise Violation(f"after {_SETTLE_S:g} calm seconds there is still: {'; '.join(left)}")

    async def _load_everything(self) -> None:
        """Whatever is still there is right, and the index knows where it is."""
        world = self._world
        for watcher in self._watchers:
            watcher.end_pauses()
        await check_calm(world, self._watchers)
        check_pages(world)
        chains = self._rng.sample(world.chains, len(world.pagestores))
        for number, store in enumerate(world.pagestores):
            if world.tenants and number == 0:
                world.tenants[f"last{number}"] = OTHER_TENANT
            client = ClientNode(world, f"last{number}", store)
            self._clients.append(client)
            client.start(0)
            assert client.task is not None
            await asyncio.wait([client.task])
            task = world.loop.spawn(client.process, client.load_all(chains[number]), client.name)
            await asyncio.wait([task], timeout=30.0)
            if not task.done():
                raise Violation(f"{client.name}: loading did not end, and all was calm")
            task.result()
            if client.counts.errors:
                raise Violation(f"{client.name}: {client.counts.errors} calls failed, and all was calm")
            client.crash()

    def _raise_failure(self, client: ClientNode) -> None:
        assert client.task is not None
        if not client.task.cancelled() and (error := client.task.exception()) is not None:
            raise error if isinstance(error, Violation) else Violation(f"{client.name} failed: {error!r}")


def _faults(rng: Random) -> Faults:
    if rng.random() < 0.25:
        return Faults()
    return Faults(
        lost_request=rng.random() * 0.05,
        lost_answer=rng.random() * 0.05,
        twice=rng.random() * 0.05,
        broken_stream=rng.random() * 0.01,
        flipped=rng.random() * 0.05,
        slow=rng.random() * 0.03,
        slow_s=rng.choice((0.05, 0.5, 2.0)),
    )


def _redis(loop: SimLoop, network: Network) -> SimRedis:
    return SimRedis(loop, network, SimClock(loop))


class _Watcher(logging.Handler):
    """Failures that the services log and survive: an unplanned error is a bug."""

    def __init__(self, trace: Callable[[str], None] | None) -> None:
        super().__init__(logging.ERROR if trace is None else logging.INFO)
        self.found: list[str] = []
        self._trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        if self._trace is not None:
            cause = f" ({record.exc_info[1]!r})" if record.exc_info else ""
            self._trace(f"{current_process()} {record.levelname} {record.getMessage()}{cause}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, KvPoolError | SimKilled):
            self.found.append(f"{record.getMessage()}: {error!r}")


@contextmanager
def _small_index(*, splits: bool) -> Iterator[None]:
    """Reconcile in 64 ranges: comparing thousands of empty ones would take a third of a history's time.

    splits: groups of a few chunks are split.
    """
    per_range = location_digest.BUCKET_COUNT // 64

    def range_of(group_head: bytes) -> int:
        return location_digest.bucket_of(group_head) // per_range

    names: dict[str, Any] = {"RANGE_COUNT": 64, "BUCKETS_PER_RANGE": per_range, "_SLICE_RANGES": 64}
    names["range_of"] = range_of
    if splits:
        names |= {"SPLIT_CHUNKS": _SPLIT_CHUNKS, "_SMALL_CHUNKS": _SPLIT_CHUNKS}
    with ExitStack() as stack:
        for module, name in _having(tuple(names)):
            stack.enter_context(mock.patch.object(module, name, names[name]))
        yield


@cache
def _having(names: tuple[str, ...]) -> list[tuple[ModuleType, str]]:
    modules = [one for name, one in sys.modules.items() if name.startswith("kvpool")]
    return [(module, name) for module in modules for name in names if hasattr(module, name)]


@contextmanager
def _seams(world: World, rng: Random, trace: Callable[[str], None] | None) -> Iterator[list[str]]:
    """Put the simulated world beneath the client library and the engines, and make chance repeatable."""
    watcher = _Watcher(trace)
    root = logging.getLogger()
    level = root.level
    root.addHandler(watcher)
    root.setLevel(watcher.level)
    SimSegmentMap.network, SimSegmentMap.servers, SimSegmentMap.tenants = world.network, {}, world.tenants
    SESSION_FDS.clear()
    state = random.getstate()
    random.seed(rng.random())
    open_channel: Any = world.network.open_channel
    with (
        small_shards(),
        _small_index(splits=rng.random() < 0.7),
        mock.patch.object(kvpool.client.endpoints, "open_channel", open_channel),
        mock.patch.object(kvpool.client.pagestore, "open_channel", open_channel),
        mock.patch.object(kvpool.client.pagestore, "SegmentMap", SimSegmentMap),
        mock.patch.object(kvpool.client.endpoints, "time", SimpleNamespace(monotonic=world.loop.time)),
        mock.patch.object(kvpool_server.node.reconciler, "time", SimpleNamespace(thread_time=world.loop.time)),
        mock.patch.object(
            kvpool_pagestore.engine.replication, "random", SimpleNamespace(Random=lambda: Random(rng.random()))
        ),
        mock.patch.object(secrets, "token_bytes", rng.randbytes),
        mock.patch.object(secrets, "randbits", rng.getrandbits),
        mock.patch.object(kvpool_pagestore.engine.sessions, "os", SimpleNamespace(close=_close_fd)),
    ):
        try:
            yield watcher.found
        finally:
            random.setstate(state)
            root.removeHandler(watcher)
            root.setLevel(level)


def _close_fd(fd: int) -> None:
    SESSION_FDS[current_process()](fd)
