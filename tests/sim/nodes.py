"""Simulated service processes: the real engines and servicers on simulated memory, disk, threads and network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from kvpool.core.keyspace import PUBLISHED_TENANT_SECRET
from kvpool_index.config import IndexConfig
from kvpool_index.engine.index import IndexEngine
from kvpool_index.metrics import IndexMetrics
from kvpool_index.servicer import IndexServicer, add_index_servicer
from tests.sim.calls import CALLER
from tests.sim.loop import SimLoop
from tests.sim.network import Network
from tests.sim.pages import TENANT
from tests.sim.redis import SimIndexStore, SimRedis

if TYPE_CHECKING:
    from tests.sim.pagestore_node import PageStoreNode


class SimClock:
    """A process's clocks: monotonic ones agree in speed, wall clocks are off by `wall_offset_s`."""

    def __init__(self, loop: SimLoop, wall_offset_s: float = 0.0) -> None:
        self._loop = loop
        self.wall_offset_s = wall_offset_s

    def __deepcopy__(self, memo: dict[int, object]) -> SimClock:
        return self

    def monotonic_s(self) -> float:
        return self._loop.now_s

    def wall_us(self) -> int:
        return 1_000_000_000_000_000 + round((self._loop.now_s + self.wall_offset_s) * 1e6)


@cache
def _index_metrics() -> IndexMetrics:
    return IndexMetrics(CollectorRegistry())


@dataclass(slots=True, kw_only=True)
class World:
    """Everything that a history plays with."""

    loop: SimLoop
    rng: Random
    network: Network
    redis: SimRedis
    indexes: list[IndexNode] = field(default_factory=list)
    pagestores: list[PageStoreNode] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    chains: Sequence[int] = (0, 1, 2)  # that clients store and load
    only_slow: bool = False  # nothing goes wrong but that disks are slow: no session ends
    tenants: dict[str, str] = field(default_factory=dict)  # of clients, by name, that are of another one
    watch_buffer_events: int = 1024
    agents: set[str] = field(default_factory=set)  # clients, by name, that trust the arena as agents do
    prepares: bool = False  # nodes make their segments before they are needed
    copies: int = 1  # of each page that nodes keep
    events_may_lack: bool = False  # a fault was planted by which events of changes get lost
    drains_done: int = 0
    lease_ttl_ms: int = 3000
    heal_s: float = 40.0  # within it the index must agree with the nodes, once nothing goes wrong any more

    def tenant_of_call(self) -> str:
        """Whose call is being served."""
        return self.tenants.get(CALLER.get(), TENANT)

    def some_s(self, most_s: float) -> float:
        return self.rng.random() * most_s


class IndexNode:
    """One index replica."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.name = f"index{number}"
        self.endpoint = f"{self.name}:1"
        self.process = world.loop.process(self.name)
        self.process.alive = False
        self.starts = 0

    def start(self) -> None:
        world = self.world
        self.starts += 1
        self.process = world.loop.process(f"{self.name}#{self.starts}")
        self.process.context.copy().run(self._start)

    def crash(self) -> None:
        self.world.loop.kill(self.process)

    def _start(self) -> None:
        world = self.world
        engine = IndexEngine(
            store=SimIndexStore(world.redis),
            config=IndexConfig(lease_ttl_ms=world.lease_ttl_ms, watch_buffer_events=world.watch_buffer_events),
            clock=SimClock(world.loop),
            metrics=_index_metrics(),
            secret_of=lambda tenant: PUBLISHED_TENANT_SECRET,
            version="sim",
        )
        servicer = IndexServicer(engine, world.tenant_of_call)
        world.network.listen(
            self.endpoint,
            self.process,
            lambda server: add_index_servicer(servicer, server),
        )
        for name, work in engine.background_work():
            world.loop.spawn(self.process, work, name)
