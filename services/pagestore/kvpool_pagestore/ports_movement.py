"""What moving pages between nodes needs to know of the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvpool.core.cluster import LiveNode, NodeInfo
from kvpool.core.errors import DrainBlocked
from kvpool_pagestore.core.copies import HeldChunk, Holder


class Placement(Protocol):
    """Who else there is, and who holds what.

    All but `me` raise StoreUnavailable, ServiceUnavailable and DeadlineExceeded.
    """

    def me(self) -> NodeInfo | None:
        """This node as it is registered; None before it is, and after it left."""
        ...

    async def nodes(self) -> Sequence[LiveNode]:
        """The live pagestores, this one included."""
        ...

    async def holders(self, runs: Sequence[Sequence[HeldChunk]]) -> list[list[Holder]]:
        """Per chunk, the live nodes that hold some of its shards; nothing for a chunk that the index does not know.

        The chunks of a run are consecutive ones of one chain group; the answer has those of all runs, in order.
        """
        ...

    async def set_draining(self, draining: bool) -> None:
        """Have placement pass this node over, or not any more. Raises DrainBlocked if this node has no index."""
        ...

    async def leave(self) -> None:
        """End the lease: this node's locations leave every match. Not to be undone in this process."""
        ...


class NoPlacement:
    """The Placement of a node that stands alone."""

    def me(self) -> NodeInfo | None:
        return None

    async def nodes(self) -> Sequence[LiveNode]:
        return ()

    async def holders(self, runs: Sequence[Sequence[HeldChunk]]) -> list[list[Holder]]:
        return [[] for run in runs for _ in run]

    async def set_draining(self, draining: bool) -> None:
        raise DrainBlocked("this pagestore has no index and knows no other node")

    async def leave(self) -> None:
        pass


NO_PLACEMENT = NoPlacement()
