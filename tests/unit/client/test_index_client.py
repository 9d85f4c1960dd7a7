"""Unary calls to the index: errors, deadlines, retries and replicas; and the watch that resumes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.client.config import ClientConfig
from kvpool.client.endpoints import Endpoints, call_with_retry
from kvpool.client.index import IndexClient
from kvpool.client.retry import Backoff
from kvpool.core.cluster import (
    ChainQuery,
    IndexEvent,
    NodeEvent,
    NodeInfo,
    NodeKind,
    ResyncEvent,
)
from kvpool.core.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    KeyspaceMismatch,
    KvPoolError,
    ServiceUnavailable,
    StoreUnavailable,
    Unauthenticated,
)
from kvpool.core.grid import ShardGrid
from kvpool.testing import eventually
from kvpool.v1 import index_pb2, index_pb2_grpc
from kvpool.wire.convert_grid import grid_to_proto
from kvpool.wire.convert_watch import index_event_to_proto
from tests.fixtures.patience import PATIENCE_S
from tests.unit.client.servers import SPEC, refuse, serve, test_config

add = index_pb2_grpc.add_IndexServiceServicer_to_server
Answer = Callable[[Any, Any], Awaitable[Any]]


class ScriptedIndex(index_pb2_grpc.IndexServiceServicer):
    """Each call takes the next answer of `script`: a message, an error, or None to be silent."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.requests: list[Any] = []
        self.metadata: list[dict[str, Any]] = []
        self.watches: list[Any] = []

    async def _answer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        answer = self.script.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, KvPoolError):
            await refuse(context, answer)
        return answer

    async def OpenKeyspace(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context)

    async def GetIndexInfo(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context)

    async def Match(self, request: Any, context: Any) -> Any:
        return await self._answer(request, context)

    async def ListChainGroups(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield await self._answer(request, context)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.watches.append(request)
        while True:
            answer = self.script.pop(0)
            if isinstance(answer, KvPoolError):
                await refuse(context, answer)
            if answer is None:
                return
            yield answer


def scripted(*script: Any) -> ScriptedIndex:
    return ScriptedIndex(*script)  # type: ignore[abstract]


def info(version: str) -> Any:
    return index_pb2.GetIndexInfoResponse(version=version)


async def test_open_keyspace_checks_what_comes_back() -> None:
    good = index_pb2.OpenKeyspaceResponse(
        keyspace_id=b"k" * 16, hash_key=b"h" * 32, grid=grid_to_proto(ShardGrid.of(SPEC)), created=True
    )
    bad = index_pb2.OpenKeyspaceResponse(keyspace_id=b"short", hash_key=b"h" * 32)
    index = scripted(good, bad, KeyspaceMismatch("kv_heads differ", field="groups[0].kv_heads"))
    async with serve(add, index) as (_, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,), bearer_token="secret"))
        opened = await client.open_keyspace("name", SPEC)
        assert (opened.keyspace, opened.grid, opened.created) == (b"k" * 16, ShardGrid.of(SPEC), True)
        assert index.metadata[0]["authorization"] == "Bearer secret"
        with pytest.raises(InvalidRequest, match="keyspace_id"):
            await client.open_keyspace("name", SPEC)
        with pytest.raises(KeyspaceMismatch) as caught:
            await client.open_keyspace("name", SPEC)
        assert caught.value.field == "groups[0].kv_heads"
        await client.close()


async def test_a_draining_replica_is_asked_again_or_left_for_another() -> None:
    one, two = scripted(Draining("stopping")), scripted(info("two"))
    async with serve(add, one) as (_, first), serve(add, two) as (_, second):
        client = IndexClient(test_config(index_endpoints=(first, second)))
        assert (await client.get_info()).version == "two"
        assert len(one.requests) == 1
        await client.close()


async def test_a_replica_that_hangs_leaves_time_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, given_s = scripted(None), scripted(info("two")), list[float]()
    stub_of = Endpoints.stub

    def noted(endpoints: Endpoints[Any]) -> Any:
        stub = stub_of(endpoints)

        def get_index_info(request: Any, *, timeout: float, metadata: Any) -> Any:
            given_s.append(timeout)  # the first one does not wait so long
            return stub.GetIndexInfo(request, timeout=0.1 if len(given_s) == 1 else timeout, metadata=metadata)

        return SimpleNamespace(GetIndexInfo=get_index_info)

    monkeypatch.setattr(Endpoints, "stub", noted)
    async with serve(add, one) as (_, first), serve(add, two) as (_, second):
        client = IndexClient(test_config(index_endpoints=(first, second)))
        assert (await client.get_info()).version == "two"
        assert len(given_s) == 2 and given_s[0] <= PATIENCE_S / 2
        await client.close()


async def test_a_dead_endpoint_is_passed_over() -> None:
    two = scripted(info("two"))
    async with serve(add, two) as (_, second):
        client = IndexClient(test_config(index_endpoints=("127.0.0.1:1", second)))
        assert (await client.get_info()).version == "two"
        await client.close()


async def test_the_deadline_counts() -> None:
    async with serve(add, scripted(None)) as (_, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,)))
        with pytest.raises(DeadlineExceeded):
            await client.get_info(timeout_s=0.05)
        await client.close()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_call_under_which_the_client_is_closed_is_not_cancelled_but_refused(cancelled: bool) -> None:
    index = scripted(None)
    async with serve(add, index) as (_, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,)))
        call = asyncio.ensure_future(client.get_info())
        await eventually(lambda: bool(index.requests))
        if cancelled:
            call.cancel()
        await client.close()
        with pytest.raises(asyncio.CancelledError if cancelled else ServiceUnavailable):
            await call


async def test_the_store_is_not_waited_for() -> None:
    index = scripted(StoreUnavailable("redis"))
    async with serve(add, index) as (_, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,)))
        with pytest.raises(StoreUnavailable):
            await client.match(ChainQuery(keyspace=b"k" * 16, chunk_hashes=b""))
        assert len(index.requests) == 1, "an engine recomputes at once instead"
        await client.close()
        with pytest.raises(ServiceUnavailable, match="closed"):
            await client.get_info()


def node_event(position: str) -> Any:
    node = NodeInfo(node_id=b"n" * 16, kind=NodeKind.AGENT)
    return index_event_to_proto(IndexEvent(position=position, event=NodeEvent(node=node, alive=True)))


async def test_a_watch_resumes_behind_the_last_event() -> None:
    index = scripted(node_event("p1"), node_event("p2"), StoreUnavailable("redis"), node_event("p3"), None)
    async with serve(add, index) as (_, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,)))
        async with aclosing(client.watch(keyspace=b"k" * 16)) as events:
            seen = [(await anext(events)).position for _ in range(3)]
        assert seen == ["p1", "p2", "p3"]
        assert [watch.after_position for watch in index.watches] == ["", "p2"]
        assert index.watches[1].keyspace_id == b"k" * 16
        await client.close()


async def test_a_watch_that_broke_before_its_first_event_says_resync() -> None:
    index = scripted(Draining("stopping"), node_event("p1"))
    async with serve(add, index) as (_, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,)))
        async with aclosing(client.watch()) as events:
            assert isinstance((await anext(events)).event, ResyncEvent)
            assert (await anext(events)).position == "p1"
        await client.close()


async def test_a_watch_raises_what_reconnecting_cannot_cure() -> None:
    index = scripted(Unauthenticated("no token"))
    async with serve(add, index) as (_, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,)))
        with pytest.raises(Unauthenticated):
            await anext(client.watch())
        await client.close()


def test_backoff_doubles_up_to_its_limit_and_starts_over() -> None:
    backoff = Backoff(1.0, 3.0, uniform=lambda low, high: high)
    assert [backoff.next_s() for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_s() == 1.0
    assert 0.5 <= Backoff(1.0, 3.0).next_s() <= 1.0


async def test_retries_end_before_a_pause_would_pass_the_deadline() -> None:
    attempts = 0

    async def attempt(remaining_s: float) -> None:
        nonlocal attempts
        attempts += 1
        raise ServiceUnavailable(f"attempt {attempts}")

    with pytest.raises(ServiceUnavailable, match="attempt 1"):
        await call_with_retry(attempt, timeout_s=PATIENCE_S, backoff=Backoff(3600.0, 3600.0))
    with pytest.raises(DeadlineExceeded):
        await call_with_retry(attempt, timeout_s=0.0, backoff=Backoff(5.0, 5.0))
    assert attempts == 1


@pytest.mark.parametrize("name", ["call_timeout_s", "requests_in_flight_max", "backoff_initial_s"])
def test_config_refuses_what_cannot_work(name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        test_config(**{name: 0})


def test_config_does_not_show_its_secret() -> None:
    assert "secret" not in repr(ClientConfig(bearer_token="secret"))


async def test_an_empty_list_of_endpoints_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="endpoint"):
        IndexClient(ClientConfig())


async def test_a_listing_that_is_cut_off_is_refused() -> None:
    whole, cut_off = (index_pb2.ListChainGroupsResponse(group_head_hashes=bytes(size)) for size in (32, 18))
    index = ScriptedIndex(whole, cut_off)  # type: ignore[abstract]
    async with serve(add, index) as (_, endpoint):
        client = IndexClient(test_config(index_endpoints=(endpoint,)))
        assert await anext(client.list_chain_groups(b"k" * 16)) == bytes(32)
        with pytest.raises(ServiceUnavailable, match="18 bytes"):
            await anext(client.list_chain_groups(b"k" * 16))
        await client.close()
