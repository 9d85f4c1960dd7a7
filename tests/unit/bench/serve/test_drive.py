"""Loads in virtual time against a scripted server: when requests start, and what their times come to."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from bench.serve.api import Api, Chunk, RequestFailed, Usage
from bench.serve.arrivals import Arrival, intended_starts_s
from bench.serve.content import IdVocabulary, Vocabulary, WordVocabulary
from bench.serve.drive import Load, LoadPlan
from bench.serve.record import Outcome, Recorder
from bench.serve.workload import Conversation, Span, Turn
from kvpool_cli.errors import CommandFailed
from tests.fixtures.virtual_time import run_virtually

IDS = IdVocabulary(1, 100, 200)


@dataclass(slots=True)
class ScriptedServer:
    """Serves one request at a time: `first_s` to the first token, then `gap_s` to each further one."""

    first_s: float = 1.0
    gap_s: float = 0.1
    at_once: int = 1
    fails: Callable[[int], str] = lambda number: ""
    gives_ids: bool = True
    reports_usage: bool = True
    started_s: list[float] = field(default_factory=list)
    bodies: list[Mapping[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    _under_way: int = 0
    _room: asyncio.Semaphore | None = None

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        number = len(self.bodies)
        self.bodies.append(body)
        self.started_s.append(asyncio.get_running_loop().time())
        self._room = self._room or asyncio.Semaphore(self.at_once)
        self._under_way += 1
        self.most_at_once = max(self.most_at_once, self._under_way)
        try:
            async with self._room:
                await asyncio.sleep(self.first_s)
                if kind := self.fails(number):
                    raise RequestFailed(kind, f"request {number}")
                for token in range(body["max_tokens"]):
                    await asyncio.sleep(self.gap_s if token else 0)
                    ids = (500 + token,) if self.gives_ids else ()
                    yield Chunk(text=f"t{token}", token_ids=ids, carries_tokens=True)
            if self.reports_usage:
                yield Chunk(usage=Usage(40, body["max_tokens"], 16))
        finally:
            self._under_way -= 1


def plan(**changes: Any) -> LoadPlan:
    options: dict[str, Any] = {
        "starts_s": None,
        "at_recorded_times": 0.0,
        "conversation_limit": 100,
        "request_limit": 0,
        "duration_s": 0.0,
        "think_s": Span(0, 0),
        "prompt_tokens_max": 0,
        "api": Api.COMPLETIONS,
        "model": "m",
        "extra_body": {},
        "seed": 1,
    }
    return LoadPlan(**{**options, **changes})


def at_rate(rate_per_s: float) -> Callable[[], Iterator[float]]:
    return partial(intended_starts_s, Arrival.CONSTANT, rate_per_s, 1)


def talks(turns: int = 1, output_tokens: int = 3) -> Iterator[Conversation]:
    for number in itertools.count():
        yield Conversation(tuple(Turn([number, turn], output_tokens) for turn in range(turns)), start_s=float(number))


@dataclass(slots=True)
class Played:
    recorder: Recorder
    outcomes: list[Outcome]
    load: Load
    ended_s: float


def play(
    how: LoadPlan,
    server: ScriptedServer,
    conversations: Iterator[Conversation],
    vocabulary: Vocabulary = IDS,
    limits_s: Mapping[str, float] | None = None,
    discard_s: float = 0.0,
    stop_after_s: float = 0.0,
) -> Played:
    async def run() -> Played:
        recorder, outcomes = Recorder(limits_s or {}, discard_s, 1), list[Outcome]()
        load = Load(how, server, vocabulary, recorder, outcomes.append)
        if stop_after_s:
            asyncio.get_running_loop().call_later(stop_after_s, load.stop)
        await load.run(conversations)
        return Played(recorder, outcomes, load, asyncio.get_running_loop().time())

    return run_virtually(run())


def test_an_open_loop_starts_on_time_and_counts_the_wait_for_a_server_that_is_behind() -> None:
    server = ScriptedServer(first_s=1.0, gap_s=0.0, at_once=1)
    played = play(plan(starts_s=at_rate(2.0), request_limit=6), server, talks())
    assert server.started_s == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    # One a second is served, two a second come: each waits half a second longer than the one before.
    assert [outcome.ttft_s for outcome in played.outcomes] == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.5])
    assert played.recorder.latency["send_lag"].maximum == pytest.approx(0)
    assert played.recorder.elapsed_s == pytest.approx(6.0)


def test_what_the_generator_holds_back_is_counted_too() -> None:
    """No coordinated omission: with room for one request, latencies are the same as if the server had queued."""
    server = ScriptedServer(first_s=1.0, gap_s=0.0, at_once=100)
    played = play(plan(starts_s=at_rate(2.0), request_limit=6, conversation_limit=1), server, talks())
    assert server.most_at_once == 1
    assert [outcome.ttft_s for outcome in played.outcomes] == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0, 3.5])
    assert played.recorder.latency["send_lag"].maximum == pytest.approx(2.5)


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    server = ScriptedServer(first_s=1.0, gap_s=0.5, at_once=100)
    played = play(plan(conversation_limit=3, request_limit=9), server, talks())
    assert server.most_at_once == 3 and len(server.bodies) == 9
    assert played.ended_s == pytest.approx(3 * 2.0)
    assert {round(outcome.ttft_s, 6) for outcome in played.outcomes} == {1.0}


def test_token_times() -> None:
    played = play(plan(request_limit=1, conversation_limit=1), ScriptedServer(1.0, 0.25), talks(output_tokens=5))
    [outcome] = played.outcomes
    assert outcome.gaps_s == pytest.approx([0.25] * 4)
    assert (outcome.ttft_s, outcome.e2e_s, outcome.tpot_s) == pytest.approx((1.0, 2.0, 0.25))
    assert (outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens) == (40, 5, 16)
    recorder = played.recorder
    assert recorder.latency["itl"].count == 4 and recorder.output_tokens == 5 and recorder.cached_tokens == 16
    assert recorder.latency["loop_lag"].maximum == pytest.approx(0)


def test_recorded_times_are_kept_at_any_speed() -> None:
    for speed, starts in ((1.0, [0.0, 1.0, 2.0]), (4.0, [0.0, 0.25, 0.5])):
        server = ScriptedServer(at_once=9)
        play(plan(at_recorded_times=speed), server, itertools.islice(talks(), 3))
        assert server.started_s == pytest.approx(starts)


def test_a_conversation_grows_by_real_answers_and_thinks_between() -> None:
    server = ScriptedServer(first_s=1.0, gap_s=0.5)
    how = plan(conversation_limit=1, think_s=Span(2, 2))
    played = play(how, server, itertools.islice(talks(turns=3, output_tokens=2), 1))
    assert [body["prompt"] for body in server.bodies] == [
        [0, 0],
        [0, 0, 500, 501, 0, 1],
        [0, 0, 500, 501, 0, 1, 500, 501, 0, 2],
    ]
    assert server.started_s == pytest.approx([0.0, 1.5 + 2, 5.0 + 2])
    assert [outcome.turn for outcome in played.outcomes] == [0, 1, 2]
    # Later turns count from when their user was ready.
    assert [outcome.ttft_s for outcome in played.outcomes] == pytest.approx([1.0] * 3)
    assert [turn.count for turn in played.recorder.ttft_by_turn] == [1, 1, 1]


def test_chats_grow_by_real_answers() -> None:
    server = ScriptedServer()
    turns = (Turn("hello", 2), Turn("go on", 1))
    play(plan(api=Api.CHAT), server, iter([Conversation(turns)]), vocabulary=WordVocabulary(1))
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["hello", "t0t1", "go on"]


def test_without_token_ids_made_up_ones_keep_the_length() -> None:
    server = ScriptedServer(gives_ids=False)
    played = play(plan(conversation_limit=1), server, itertools.islice(talks(turns=2, output_tokens=4), 1))
    assert played.recorder.stand_in_answers == 1
    assert len(server.bodies[1]["prompt"]) == 2 + 4 + 2


def test_tokens_are_counted_here_where_the_server_does_not() -> None:
    played = play(plan(request_limit=1, conversation_limit=1), ScriptedServer(reports_usage=False), talks())
    assert (played.recorder.uncounted, played.recorder.prompt_tokens, played.recorder.output_tokens) == (1, 2, 3)
    assert played.recorder.cached_known == 0


def test_failures_end_their_conversation_and_count_by_kind() -> None:
    server = ScriptedServer(fails=lambda number: {1: "http_500", 2: "timeout"}.get(number, ""))
    played = play(plan(conversation_limit=1, request_limit=5), server, talks(turns=3))
    recorder = played.recorder
    assert recorder.errors == {"http_500": 1, "timeout": 1} and recorder.examples["timeout"] == ["request 2"]
    assert (recorder.ok, recorder.failed) == (3, 2)
    assert recorder.abandoned_turns == 1 + 2
    assert recorder.latency["ttft"].count == 3


def test_an_answer_without_tokens_is_an_error() -> None:
    played = play(plan(request_limit=1, conversation_limit=1), ScriptedServer(), talks(output_tokens=0))
    assert played.recorder.errors == {"empty": 1}


def test_duration_starts_nothing_new_and_waits_for_what_is_under_way() -> None:
    server = ScriptedServer(first_s=1.0, gap_s=0.0, at_once=1)
    played = play(plan(starts_s=at_rate(2.0), duration_s=2.0), server, talks())
    assert len(server.bodies) == 4 and played.recorder.ok == 4 and played.recorder.unfinished == 0
    closed = play(plan(conversation_limit=1, duration_s=2.5), ScriptedServer(gap_s=0.0), talks())
    assert closed.recorder.ok == 3


def test_a_stop_cuts_off_what_is_under_way_and_keeps_the_rest() -> None:
    server = ScriptedServer(first_s=1.0, gap_s=0.0, at_once=1)
    played = play(plan(starts_s=at_rate(2.0)), server, talks(), stop_after_s=2.25)
    assert played.ended_s == pytest.approx(2.25)
    assert (played.recorder.ok, played.recorder.unfinished, played.load.in_flight) == (2, 3, 0)


def test_prompts_that_grow_too_long_end_their_conversation() -> None:
    server = ScriptedServer()
    how = plan(conversation_limit=1, prompt_tokens_max=8)
    played = play(how, server, itertools.islice(talks(turns=4, output_tokens=2), 1))
    assert [len(body["prompt"]) for body in server.bodies] == [2, 6]
    assert played.recorder.abandoned_turns == 2


def test_goodput_counts_those_within_all_limits() -> None:
    server = ScriptedServer(first_s=1.0, gap_s=0.1, at_once=1)
    how = plan(starts_s=at_rate(1.0), request_limit=4)  # each takes 1.2 s: they fall behind by 0.2 s each
    for limits_s, good in (
        ({}, 4),
        ({"ttft": 1.3}, 2),
        ({"ttft": 1.3, "tpot": 0.05}, 0),
        ({"itl": 0.11}, 4),
        ({"e2e": 1.25}, 1),
    ):
        played = play(how, server, talks(), limits_s=limits_s)
        assert played.recorder.good == good, limits_s
        server = ScriptedServer(first_s=1.0, gap_s=0.1, at_once=1)


def test_the_beginning_can_be_left_out() -> None:
    server = ScriptedServer(first_s=0.1, gap_s=0.0, at_once=9)
    played = play(plan(starts_s=at_rate(2.0), request_limit=6), server, talks(), discard_s=1.0)
    assert (played.recorder.discarded, played.recorder.ok) == (2, 4)
    assert played.recorder.elapsed_s == pytest.approx(2.5 + 0.1 - 1.0)
    assert played.recorder.all_prompt_tokens == 6 * 40


def test_warm_up_records_nothing() -> None:
    server = ScriptedServer(fails=lambda number: "http_500" if number == 0 else "", at_once=9)

    async def run() -> tuple[int, Recorder]:
        recorder = Recorder({}, 0.0, 1)
        load = Load(plan(), server, IDS, recorder)
        return await load.warm_up(list(itertools.islice(talks(), 6))), recorder

    failures, recorder = run_virtually(run())
    assert failures == 1 and len(server.bodies) == 6 and server.most_at_once == 4
    assert (recorder.ok, recorder.failed, recorder.latency["ttft"].count) == (0, 0, 0)


def test_a_stop_ends_a_warm_up_that_hangs() -> None:
    async def run() -> float:
        load = Load(plan(), ScriptedServer(first_s=1e6), IDS, Recorder({}, 0.0, 1))
        asyncio.get_running_loop().call_later(3.0, load.stop)
        await load.warm_up(list(itertools.islice(talks(), 6)))
        await load.run(talks())
        return asyncio.get_running_loop().time()

    assert run_virtually(run()) == pytest.approx(3.0)


@pytest.mark.parametrize("how", [plan(conversation_limit=3), plan(starts_s=at_rate(1.0))], ids=["closed", "open"])
def test_what_is_wrong_with_the_input_ends_the_run(how: LoadPlan) -> None:
    def broken() -> Iterator[Conversation]:
        yield from itertools.islice(talks(), 2)
        raise CommandFailed("line 3 is wrong")

    with pytest.raises(CommandFailed, match="line 3"):
        play(how, ScriptedServer(), broken())


def test_no_conversations_end_at_once() -> None:
    assert play(plan(starts_s=at_rate(1.0)), ScriptedServer(), iter([])).ended_s == 0
    assert play(plan(), ScriptedServer(), iter([])).ended_s == 0
