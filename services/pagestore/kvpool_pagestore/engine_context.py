"""What the engine's parts share: its surroundings, and the places where pages are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpool.core.clock import Clock
from kvpool.core.tracing import Tracer
from kvpool_pagestore.core.events import PageEvents
from kvpool_pagestore.core.page_table import PageTable
from kvpool_pagestore.engine_tasks import EngineTasks
from kvpool_pagestore.metrics import PageStoreMetrics

if TYPE_CHECKING:  # they use this module
    from kvpool_pagestore.engine_disk import DiskTier
    from kvpool_pagestore.engine_sealing import Sealing
    from kvpool_pagestore.engine_space import ArenaSpace
    from kvpool_pagestore.engine_writeback import WriteBack


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Serves every part and knows nothing of single pages."""

    clock: Clock
    tasks: EngineTasks
    events: PageEvents
    metrics: PageStoreMetrics
    tracer: Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The arena: what is in it, room in it, and headers and sums of its pages."""

    table: PageTable
    space: ArenaSpace
    sealing: Sealing


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """All places of this node. A node without a disk has neither `disk` nor `write_back`."""

    staging: Staging
    disk: DiskTier | None
    write_back: WriteBack | None
