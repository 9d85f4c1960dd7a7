"""Which pagestore a command means by NODE."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvpool.core.cluster import LiveNode, NodeInfo, NodeKind, NodeLoad
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable, StoreFault
from kvpool_cli import targets
from kvpool_cli.errors import CommandFailed
from kvpool_cli.targets import Target, client_config, live_pagestores, on_pagestores, said


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


async def test_a_node_that_hangs_is_not_asked_what_may_take_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Control:
        def __init__(self, endpoint: str) -> None:
            self.endpoint = endpoint

        async def status(self, *, timeout_s: float) -> None:
            if self.endpoint.endswith(":7201"):
                raise DeadlineExceeded(f"no answer within {timeout_s:g} s")

    @asynccontextmanager
    async def open_pagestore(target: Target, endpoint: str) -> AsyncIterator[Any]:
        yield Control(endpoint)

    async def call(control: Any) -> str:
        assert not control.endpoint.endswith(":7201")
        return str(control.endpoint)

    monkeypatch.setattr(targets, "open_pagestore", open_pagestore)
    nodes = await Nodes().list_nodes(NodeKind.PAGESTORE)
    first, second, third = await on_pagestores(Target(index_endpoint="i:1", state=None), nodes, call)
    assert (first[1], third[1]) == ("10.0.0.1:7200", "10.0.0.1:7202")
    assert isinstance(second[1], KvPoolError) and said(second[1]) == "no answer within 3 s"


def test_advice_for_engines_is_not_given_to_operators() -> None:
    assert said(ServiceUnavailable("it is gone")) == "it is gone"
    assert said(StoreFault("the disk is gone")) == StoreFault("the disk is gone").message
