"""Session streams whose handler is cancelled by something other than the end of the session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.tracing import Span
from kvpool.v1 import gpuagent_pb2, pagestore_pb2
from kvpool.wire.convert import BATCH_MESSAGES_MAX, unbatch
from kvpool_server.session_stream import End, Role, SessionRules, SessionStream
from tests.fixtures.patience import PATIENCE_S

ROLES = {"open": Role.OPEN, "reserve": Role.REQUEST, "heartbeat": Role.HEARTBEAT, "close": Role.CLOSE}
RULES = SessionRules(
    roles=ROLES, response=pagestore_pb2.SessionResponse, requests_max=4, heartbeat_s=PATIENCE_S, cancels_requests=True
)


class NotedSpan(Span):
    def __init__(self) -> None:
        self.failures: list[KvPoolError | str] = []

    def fail(self, error: KvPoolError | str) -> None:
        self.failures.append(error)


class Handler:
    """What `at` names waits for something that is cancelled, as a call is when its channel is closed."""

    def __init__(self, at: str) -> None:
        self.at, self.noted, self.ends = at, NotedSpan(), list[End]()

    async def _wait(self, at: str) -> None:
        if at == self.at:
            waited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waited.cancel()
            await waited

    async def open(self, request: Any, send: Callable[[Any], None]) -> None:
        await self._wait("open")
        opened = pagestore_pb2.SessionResponse()
        opened.opened.SetInParent()
        send(opened)

    def handle_now(self, request: Any) -> Any:
        raise NotImplementedError

    async def handle(self, request: Any, send: Callable[[Any], None], span: Span) -> Any:
        await self._wait("handle")
        raise NotImplementedError

    def refused(self, request: Any) -> None:
        raise NotImplementedError

    def span(self, request: Any) -> Span:
        return self.noted

    async def ended(self) -> KvPoolError:
        await asyncio.Event().wait()
        raise NotImplementedError

    async def end(self, end: End) -> None:
        self.ends.append(end)


def message(request_id: int, kind: str) -> pagestore_pb2.SessionRequest:
    request = pagestore_pb2.SessionRequest(request_id=request_id)
    getattr(request, kind).SetInParent()
    return request


class Peer:
    """Sends each message once the one before has been answered."""

    def __init__(self, *messages: pagestore_pb2.SessionRequest) -> None:
        self._messages = messages
        self._answered = asyncio.Semaphore(1)
        self.answers: list[pagestore_pb2.SessionResponse] = []

    async def messages(self) -> AsyncIterator[pagestore_pb2.SessionRequest]:
        for each in self._messages:
            await self._answered.acquire()
            yield each
        await asyncio.Event().wait()

    async def write(self, answer: pagestore_pb2.SessionResponse) -> None:
        self.answers.append(answer)
        self._answered.release()


async def test_a_request_whose_call_was_cancelled_under_it_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    handler = Handler("handle")
    peer = Peer(message(1, "open"), message(2, "reserve"), message(3, "close"))
    async with asyncio.timeout(PATIENCE_S):
        await SessionStream(RULES, handler).serve(peer.messages(), peer.write)
    assert [(each.request_id, each.WhichOneof("kind")) for each in peer.answers] == [
        (1, "opened"),
        (2, "error"),
        (0, "closed"),
    ]
    assert "internal error" in peer.answers[1].error.message
    assert len(handler.noted.failures) == 1
    assert "a request failed" in caplog.text
    assert [end.error for end in handler.ends] == [None]


async def test_a_session_whose_opening_was_cancelled_under_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    handler = Handler("open")
    peer = Peer(message(1, "open"))
    with pytest.raises(KvPoolError, match="internal error"):
        async with asyncio.timeout(PATIENCE_S):
            await SessionStream(RULES, handler).serve(peer.messages(), peer.write)
    assert "a session could not be opened" in caplog.text
    assert len(handler.ends) == 1


class Answering(Handler):
    """Answers each store at once, in two parts."""

    async def handle(self, request: Any, send: Callable[[Any], None], span: Span) -> Any:
        send(gpuagent_pb2.EngineResponse(gathered=gpuagent_pb2.EngineGathered(chunk_count=request.request_id)))
        return gpuagent_pb2.EngineResponse(store_done=gpuagent_pb2.EngineStoreDone())

    async def open(self, request: Any, send: Callable[[Any], None]) -> None:
        send(gpuagent_pb2.EngineResponse(ready=gpuagent_pb2.EngineReady()))


ENGINE_RULES = SessionRules(
    roles={"register": Role.OPEN, "store": Role.REQUEST, "close": Role.CLOSE},
    response=gpuagent_pb2.EngineResponse,
    requests_max=4,
    heartbeat_s=PATIENCE_S,
    cancels_requests=True,
    reads_batched=lambda first: first.register.reads_batched,
)


def engine_message(request_id: int, kind: str) -> gpuagent_pb2.EngineRequest:
    request = gpuagent_pb2.EngineRequest(request_id=request_id)
    getattr(request, kind).SetInParent()
    return request


@pytest.mark.parametrize("batches", [True, False])
async def test_messages_that_travel_together_are_served_like_others_and_so_are_their_answers(batches: bool) -> None:
    together = engine_message(2, "store")
    together.batched.extend(engine_message(number, "store") for number in (3, 4))
    answers: list[gpuagent_pb2.EngineResponse] = []
    written: list[int] = []
    ready, done = asyncio.Event(), asyncio.Semaphore(0)

    async def messages() -> AsyncIterator[gpuagent_pb2.EngineRequest]:
        register = engine_message(1, "register")
        register.register.reads_batched = batches
        yield register
        await ready.wait()
        yield together
        await done.acquire()
        await done.acquire()
        await done.acquire()
        yield engine_message(5, "close")
        await asyncio.Event().wait()

    async def write(answer: gpuagent_pb2.EngineResponse) -> None:
        parts = unbatch(answer)
        answers.extend(parts)
        ready.set()
        for part in parts:
            if part.WhichOneof("kind") == "store_done":
                done.release()
        written.append(len(parts))
        await asyncio.sleep(0)

    async with asyncio.timeout(PATIENCE_S):
        await SessionStream(ENGINE_RULES, Answering("")).serve(messages(), write)
    for number in (2, 3, 4):
        kinds = [each.WhichOneof("kind") for each in answers if each.request_id == number]
        assert kinds == ["gathered", "store_done"]
    assert answers[-1].WhichOneof("kind") == "closed"
    assert (max(written) > 1) == batches  # a peer that does not say that it reads them gets none


async def test_a_peer_that_sends_too_many_messages_at_once_loses_its_session() -> None:
    flood = engine_message(2, "store")
    flood.batched.extend(engine_message(number, "store") for number in range(3, 3 + BATCH_MESSAGES_MAX))
    answers: list[gpuagent_pb2.EngineResponse] = []

    async def messages() -> AsyncIterator[gpuagent_pb2.EngineRequest]:
        yield engine_message(1, "register")
        yield flood
        await asyncio.Event().wait()

    async def write(answer: gpuagent_pb2.EngineResponse) -> None:
        answers.append(answer)

    handler = Answering("")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(InvalidRequest, match="`batched` may have"):
            await SessionStream(ENGINE_RULES, handler).serve(messages(), write)
    assert not [each for each in answers if each.request_id > 1]
    assert len(handler.ends) == 1
