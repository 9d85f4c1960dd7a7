"""A pagestore's link to an index: an incarnation that is granted late, and a disk that does not take it."""

from __future__ import annotations

from typing import Any

from kvpool.core.cluster import NodeInfo, NodeKind, NodeLoad
from kvpool.core.errors import InvalidRequest, KvPoolError, StaleIncarnation, StoreFault
from kvpool.testing import eventually
from kvpool.v1 import index_pb2_grpc
from kvpool_pagestore.adapters.index_link import NodeIndexLink, Registrant
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.index_peer import NODE_ID, Node, ScriptedIndex
from tests.unit.client.servers import refuse, serve


async def test_a_late_incarnation_that_the_disk_refuses_is_registered_again_until_it_is_kept() -> None:
    index = ScriptedIndex()  # type: ignore[abstract]
    async with serve(index_pb2_grpc.add_IndexServiceServicer_to_server, index) as (_, endpoint):
        link = NodeIndexLink((endpoint,), PATIENCE_S, 60.0)
        index.answers_registrations.clear()
        adopted: list[int] = []

        async def adopt(incarnation: int) -> None:
            adopted.append(incarnation)
            if len(adopted) < 3:
                raise StoreFault("planted: the disk is full")

        registrant = Registrant(
            node=NodeInfo(node_id=NODE_ID, kind=NodeKind.PAGESTORE, endpoint="127.0.0.1:1"),
            last_incarnation=7,
            load=NodeLoad,
            truth=Node(index, link._client, truth={1: 1}),
            on_superseded=lambda error: None,
            on_policy_version=lambda version: None,
            adopt=adopt,
        )
        assert await link.register(registrant, 0.01) == 0
        assert not link.me() and not adopted
        index.answers_registrations.set()
        await eventually(lambda: link.me() is not None)
        assert (me := link.me()) is not None and me.incarnation == adopted[-1] and len(adopted) == 3
        stream = await index.streams.next()
        opened = await stream.next("open")
        assert opened.open.incarnation == adopted[-1], "nothing was announced under an incarnation that was not kept"
        await link.close()


class RefusingIndex(ScriptedIndex):
    """Registers after some refusals; the first registration has no answer."""

    def __init__(self, refusals: list[KvPoolError]) -> None:
        super().__init__()
        self._refusals = refusals

    async def RegisterNode(self, request: Any, context: Any) -> Any:
        if not self.answers_registrations.is_set():
            await self.answers_registrations.wait()
        if self._refusals:
            await refuse(context, self._refusals.pop(0))
        return await super().RegisterNode(request, context)


def registrant_of(index: ScriptedIndex, link: NodeIndexLink, superseded: list[BaseException]) -> Registrant:
    async def adopt(incarnation: int) -> None:
        pass

    return Registrant(
        node=NodeInfo(node_id=NODE_ID, kind=NodeKind.PAGESTORE, endpoint="127.0.0.1:1"),
        last_incarnation=7,
        load=NodeLoad,
        truth=Node(index, link._client, truth={1: 1}),
        on_superseded=superseded.append,
        on_policy_version=lambda version: None,
        adopt=adopt,
    )


async def test_a_node_that_is_refused_late_asks_again_until_it_is_registered() -> None:
    index = RefusingIndex([KvPoolError("planted"), InvalidRequest("planted")])  # type: ignore[abstract]
    async with serve(index_pb2_grpc.add_IndexServiceServicer_to_server, index) as (_, endpoint):
        link = NodeIndexLink((endpoint,), PATIENCE_S, 60.0)
        index.answers_registrations.clear()
        assert await link.register(registrant_of(index, link, []), 0.01) == 0
        index.answers_registrations.set()
        await eventually(lambda: link.me() is not None)
        await link.close()


async def test_a_node_that_is_superseded_late_stops_and_asks_no_more() -> None:
    index, superseded = RefusingIndex([StaleIncarnation("a newer process")] * 3), list[BaseException]()  # type: ignore[abstract]
    async with serve(index_pb2_grpc.add_IndexServiceServicer_to_server, index) as (_, endpoint):
        link = NodeIndexLink((endpoint,), PATIENCE_S, 60.0)
        index.answers_registrations.clear()
        assert await link.register(registrant_of(index, link, superseded), 0.01) == 0
        index.answers_registrations.set()
        await eventually(lambda: bool(superseded))
        assert isinstance(superseded[0], StaleIncarnation) and not index.registered
        await link.close()
