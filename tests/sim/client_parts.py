"""What clients of the simulation are counted and bounded by."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.cluster import ChainMatch, RemoteSource
from tests.sim.loop import Violation

CALL_BOUND_S = 20.0  # virtual: no operation lasts longer, pauses of its own process aside


@dataclass(slots=True)
class ClientCounts:
    """What became of a client's work."""

    stored: int = 0
    hits: int = 0
    misses: int = 0
    errors: int = 0
    operations: int = 0


@dataclass(slots=True)
class Operation:
    """One that is running: for the check that nothing hangs."""

    name: str
    began_s: float
    paused_s: float = 0.0


def check_bound(name: str, operation: Operation, now_s: float) -> None:
    """No call hangs: neither one that ended nor one that runs."""
    lasted_s = now_s - operation.began_s - operation.paused_s
    if lasted_s > CALL_BOUND_S:
        raise Violation(f"{name}: {operation.name} lasted {lasted_s:.1f} s")


def sources_of(match: ChainMatch, own_node_id: bytes) -> dict[int, tuple[RemoteSource, ...]]:
    found: dict[int, tuple[RemoteSource, ...]] = {}
    position = 0
    for run in match.runs:
        sources = [
            RemoteSource(
                node_id=one.node_id,
                incarnation=one.incarnation,
                bulk_endpoint=match.nodes[one.node_id].bulk_endpoint,
            )
            for one in run.locations
            if one.node_id != own_node_id and one.node_id in match.nodes
        ]
        for _ in range(run.chunk_count):
            found[position] = tuple(dict.fromkeys(sources))
            position += 1
    return found
