"""Which pagestore a command means by NODE."""

from __future__ import annotations

import pytest

from kvpool.cli.output import CommandFailed
from kvpool.cli.targets import Target, client_config, live_pagestores
from kvpool.core.cluster import LiveNode, NodeInfo, NodeKind, NodeLoad


def node(first: int, host: str, port: int) -> LiveNode:
    info = NodeInfo(
        node_id=bytes([first, 1]) * 8, kind=NodeKind.PAGESTORE, host_id=host, endpoint=f"10.0.0.1:{port}", incarnation=1
    )
    return LiveNode(info=info, load=NodeLoad(), lease_remaining_ms=1000)


class Nodes:
    async def list_nodes(self, kind: NodeKind) -> list[LiveNode]:
        assert kind is NodeKind.PAGESTORE
        return [node(0xAB, "rack-1", 7200), node(0xAC, "rack-2", 7201), node(0xAD, "rack-2", 7202)]


@pytest.mark.parametrize(("name", "port"), [("ab", 7200), ("AC01", 7201), ("rack-1", 7200), ("10.0.0.1:7202", 7202)])
async def test_a_node_is_named_by_id_host_or_endpoint(name: str, port: int) -> None:
    (found,) = await live_pagestores(Nodes(), name)  # type: ignore[arg-type]  # all that it asks of an index
    assert found.info.endpoint == f"10.0.0.1:{port}"


@pytest.mark.parametrize(
    ("name", "said"), [("a", "3 pagestores"), ("rack-2", "2 pagestores"), ("zz", "no live pagestore")]
)
async def test_a_name_that_is_not_exactly_one_nodes_is_refused_naming_all(name: str, said: str) -> None:
    with pytest.raises(CommandFailed, match=said) as refused:
        await live_pagestores(Nodes(), name)  # type: ignore[arg-type]
    assert "ab01ab01" in str(refused.value) and "rack-2" in str(refused.value)


async def test_without_a_name_all_are_meant() -> None:
    assert len(await live_pagestores(Nodes())) == 3  # type: ignore[arg-type]


def test_several_replicas_may_be_named_and_are_tried_in_turn() -> None:
    target = Target(index_endpoint="index-0:7100,index-1:7100", state=None)
    assert client_config(target).index_endpoints == ("index-0:7100", "index-1:7100")
