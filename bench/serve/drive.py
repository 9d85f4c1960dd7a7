"""Plays a load: when requests start, how conversations go on, what their answers' times are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from bench.serve.api import Api, Chunk, RequestFailed, request_body
from bench.serve.content import Vocabulary
from bench.serve.record import Outcome, Recorder
from bench.serve.workload import Conversation, History, Span

_LAG_PROBE_S = 0.1
_WARM_UP_AT_ONCE = 4


class Server(Protocol):
    """What is under load."""

    def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The chunks of one answer. Raises RequestFailed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """How hard, and for how long.

    starts_s: when conversations are meant to start, an open loop; None: `conversation_limit` users who wait for their
    answers, a closed loop. request_limit, duration_s: 0 is no limit.
    """

    starts_s: Callable[[], Iterator[float]] | None
    at_recorded_times: float  # speed at which the conversations' own start times are kept; 0: they are not
    conversation_limit: int
    request_limit: int
    duration_s: float
    think_s: Span
    prompt_tokens_max: int  # a conversation ends before its prompt would be longer; 0: no limit
    api: Api
    model: str
    extra_body: Mapping[str, Any]
    seed: int

    @property
    def open_loop(self) -> bool:
        """Whether starts wait for no answer."""
        return self.starts_s is not None or self.at_recorded_times > 0


class Load:
    """One run. `stop` may be called at any time: what is under way is then cancelled and counted as unfinished."""

    def __init__(
        self,
        plan: LoadPlan,
        server: Server,
        vocabulary: Vocabulary,
        recorder: Recorder,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        self.sent = self.in_flight = 0
        self._plan, self._server, self._vocabulary, self._recorder = plan, server, vocabulary, recorder
        self._on_outcome = on_outcome
        self._rng = random.Random(f"{plan.seed}/think")
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()  # stopped, failed, or nothing left to do
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """End the run."""
        self._over.set()

    async def run(self, conversations: Iterator[Conversation]) -> None:
        """Until all is done or stopped. Raises what reading the conversations raises."""
        self._recorder.begin(self._loop.time())
        self._spawn(self._start_on_time(conversations) if self._plan.open_loop else self._start_users(conversations))
        probe = self._loop.create_task(self._probe_lag())
        try:
            await self._over.wait()
        finally:
            await _cancel({*self._tasks, probe})
        if self._failure is not None:
            raise self._failure

    async def warm_up(self, conversations: list[Conversation]) -> int:
        """Send these, a few at once, and record nothing; returns how many failed. A stop ends it early."""
        turns, failures = iter(conversations), 0

        async def work() -> None:
            nonlocal failures
            for conversation in turns:
                outcome = Outcome(0.0, 0.0)
                await self._ask(self._begun(conversation), conversation.turns[0].output_tokens, outcome)
                failures += bool(outcome.error)

        working = asyncio.gather(*(work() for _ in range(_WARM_UP_AT_ONCE)))
        over = self._loop.create_task(self._over.wait())
        waited: list[asyncio.Future[Any]] = [working, over]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        await _cancel(waited)
        return failures

    # Starting

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
        if self._failure or not self._tasks:
            self._over.set()

    async def _start_on_time(self, conversations: Iterator[Conversation]) -> None:
        """Open loop. Where conversation_limit holds a start back, its wait counts: the intended time stays."""
        room = asyncio.Semaphore(self._plan.conversation_limit)
        begin_s = self._recorder.begin_s
        for start_s, conversation in self._timed(conversations):
            if self._plan.duration_s and start_s >= self._plan.duration_s:
                return
            await self._sleep_until(begin_s + start_s)
            await room.acquire()
            if not self._may_start():
                return
            self._spawn(self._converse(conversation, begin_s + start_s)).add_done_callback(lambda _: room.release())
            await asyncio.sleep(0)  # so that a limit of requests counts it

    def _timed(self, conversations: Iterator[Conversation]) -> Iterator[tuple[float, Conversation]]:
        if self._plan.starts_s is not None:
            yield from zip(self._plan.starts_s(), conversations, strict=False)
            return
        for conversation in conversations:
            yield conversation.start_s / self._plan.at_recorded_times, conversation

    async def _start_users(self, conversations: Iterator[Conversation]) -> None:
        """Closed loop."""
        for _ in range(self._plan.conversation_limit):
            self._spawn(self._be_user(conversations))

    async def _be_user(self, conversations: Iterator[Conversation]) -> None:
        while self._may_start():
            conversation = next(conversations, None)
            if conversation is None:
                return
            await self._converse(conversation, self._loop.time())

    def _may_start(self) -> bool:
        plan = self._plan
        if plan.request_limit and self.sent >= plan.request_limit:
            return False
        return not plan.duration_s or self._loop.time() - self._recorder.begin_s < plan.duration_s

    # Talking

    async def _converse(self, conversation: Conversation, intended_s: float) -> None:
        """All turns, each on top of the real answers before it; a turn that failed ends it."""
        history = self._begun(conversation)
        for number, turn in enumerate(conversation.turns):
            if number:
                intended_s = self._loop.time() + self._plan.think_s.draw(self._rng)
                await self._sleep_until(intended_s)
                history.ask(turn.content)
                if not self._may_start():
                    return
            if 0 < self._plan.prompt_tokens_max < history.prompt_tokens:
                self._recorder.abandoned_turns += len(conversation.turns) - number
                return
            outcome = await self._request(history, turn.output_tokens, intended_s, number)
            left = len(conversation.turns) - number - 1
            if outcome.error:
                self._recorder.abandoned_turns += left
                return
            if left:
                self._remember(history, outcome)

    def _begun(self, conversation: Conversation) -> History:
        history = History(self._vocabulary, chat=self._plan.api is Api.CHAT)
        history.ask(conversation.turns[0].content)
        return history

    async def _request(self, history: History, output_tokens: int, intended_s: float, turn: int) -> Outcome:
        outcome = Outcome(intended_s, self._loop.time(), turn)
        self.sent += 1
        self.in_flight += 1
        try:
            await self._ask(history, output_tokens, outcome)
        except asyncio.CancelledError:
            self._recorder.unfinished += 1
            raise
        finally:
            self.in_flight -= 1
        self._recorder.add(outcome)
        self._on_outcome(outcome)
        return outcome

    def _remember(self, history: History, outcome: Outcome) -> None:
        token_ids = outcome.token_ids
        if isinstance(history.fields().get("prompt"), list) and not token_ids:
            # No ids came back: made-up ones keep the length, and the server's own cache of the answer is of no use.
            stand_in = self._vocabulary.content(f"stand-in/{self.sent}", outcome.output_tokens)
            token_ids = [token for token in stand_in if isinstance(token, int)]
            self._recorder.stand_in_answers += 1
        history.answer("".join(outcome.said), token_ids)

    async def _ask(self, history: History, output_tokens: int, outcome: Outcome) -> None:
        """Send one request, and record its course in `outcome`."""
        body = request_body(history.fields(), self._plan.model, output_tokens, self._plan.extra_body)
        try:
            async with aclosing(self._server.stream(body)) as chunks:
                async for chunk in chunks:
                    self._note(chunk, outcome)
            if outcome.first_s is None:
                raise RequestFailed("empty", "the answer ended well but had no tokens")
        except RequestFailed as error:
            outcome.error, outcome.detail = error.kind, error.detail
        outcome.end_s = self._loop.time()
        if not outcome.counted_by_server:
            outcome.prompt_tokens = history.prompt_tokens
            outcome.output_tokens = len(outcome.token_ids) or outcome.token_events

    def _note(self, chunk: Chunk, outcome: Outcome) -> None:
        now_s = self._loop.time()
        outcome.said.append(chunk.text)
        outcome.token_ids += chunk.token_ids
        if chunk.carries_tokens:
            if outcome.first_s is None:
                outcome.first_s = now_s
            else:
                outcome.gaps_s.append(now_s - outcome.last_s)
            outcome.last_s = now_s
        if chunk.usage is not None:
            outcome.counted_by_server = True
            outcome.prompt_tokens = chunk.usage.prompt_tokens
            outcome.output_tokens = chunk.usage.completion_tokens
            outcome.cached_tokens = chunk.usage.cached_tokens

    # Time

    async def _sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._loop.time()))

    async def _probe_lag(self) -> None:
        """How late this process is with what it wanted to do: a generator that is busy measures itself."""
        while True:
            due_s = self._loop.time() + _LAG_PROBE_S
            await asyncio.sleep(_LAG_PROBE_S)
            self._recorder.latency["loop_lag"].add(self._loop.time() - due_s)


async def _cancel(tasks: Collection[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
