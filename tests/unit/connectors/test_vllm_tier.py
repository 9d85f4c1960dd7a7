"""The tier below vLLM's offloading, without vLLM: whose KV it is, what is asked and offered, how jobs end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.tier.jobs import FAILED_PAUSE_S, LACKING_S, TierJobs
from kvpool.connectors.vllm.tier.lookups import TierLookups
from kvpool.connectors.vllm.tier.settings import TierSettings
from kvpool.connectors.vllm.tier.step_yield import StepYield
from kvpool.core.errors import InvalidRequest, ServiceUnavailable
from kvpool.core.retention import NO_RETENTION, Retention

CHUNK = 64
ADDRESSES = {"index_endpoints": ["127.0.0.1:7100"], "pagestore": "unix:/run/kvpool/pagestore.sock"}
FACTS = {"model_name": "org/model", "tp_size": 1, "root_hash": "00"}


class ScriptedStore:
    """Keeps chunks; calls end when the test says so, at once if `held` is False."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, bytes] = {}
        self.asked: list[list[bytes]] = []
        self.offered: list[list[bytes]] = []
        self.retained: list[tuple[bytes, Retention]] = []
        self.held = False
        self.error: Exception | None = None
        self._waiting: list[Any] = []

    def exists(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        self.asked.append(list(keys))
        return self._call(lambda: [key in self.chunks for key in keys])

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Future[list[bool]]:
        def copy() -> list[bool]:
            for key, buffer in zip(keys, buffers, strict=True):
                buffer[:] = self.chunks.get(key, b"?" * CHUNK)
            return [key in self.chunks for key in keys]

        return self._call(copy)

    def put(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], written: list[int], retention: Retention
    ) -> Future[list[bool]]:
        self.offered.append(list(keys))
        self.retained += [(key, retention) for key in keys if retention != NO_RETENTION]

        def copy() -> list[bool]:
            for position, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
                if key not in self.chunks:
                    self.chunks[key] = bytes(buffer)
                    written.append(position)
            return [True] * len(keys)

        return self._call(copy)

    def release(self, count: int | None = None) -> None:
        """Carry out what is held, or the first so many calls of it."""
        ready = self._waiting[:count]
        del self._waiting[:count]
        for run in ready:
            run()

    def _call(self, work: Any) -> Future[list[bool]]:
        answer: Future[list[bool]] = Future()

        def run() -> None:
            if self.error is not None:
                answer.set_exception(self.error)
            else:
                answer.set_result(work())

        if self.held:
            self._waiting.append(run)
        else:
            run()
        return answer


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class World:
    """A region of 16 chunks with a store below it."""

    def __init__(self, store_chunks_max: int = 16) -> None:
        self.clock, self.store = Clock(), ScriptedStore()
        self.known = KnownChunks(known_s=60.0, limit=1000, now_s=self.clock)
        self.memory = bytearray(b"".join(bytes([number]) * CHUNK for number in range(16)))
        self.jobs = TierJobs(memoryview(self.memory), CHUNK, self.known, store_chunks_max * CHUNK, self.clock)
        self.lookups = TierLookups(self.known, 0.5, self.clock)

    def chunk(self, number: int) -> bytes:
        return bytes(self.memory[number * CHUNK : (number + 1) * CHUNK])


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def settings(**given: Any) -> TierSettings:
    return TierSettings.of({**ADDRESSES, "model_revision": "r1", **given})


def space_id(given: TierSettings, epoch: str = "", size_bytes: int = 4096, **facts: Any) -> str:
    return given.space({**FACTS, **facts}, size_bytes, epoch).name


def test_a_tier_without_a_revision_is_refused_with_what_to_set() -> None:
    with pytest.raises(InvalidRequest, match="model_revision"):
        TierSettings.of(ADDRESSES)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"revision": "x"}, "revision"),
        ({"known_s": 0}, "known_s"),
        ({"known_s": "long"}, "known_s"),
        ({"lookup_timeout_s": -1}, "lookup_timeout_s"),
        ({"store_bytes_in_flight_max": -1}, "store_bytes_in_flight_max"),
        ({"enable_kv_events": 1}, "enable_kv_events"),
        ({"locality": "HERE"}, "locality"),
        ({"pages_in_flight": 0}, "pages_in_flight"),
        ({"pages_in_flight": True}, "pages_in_flight"),
        ({"trusts_arena": 1}, "trusts_arena"),
        ({"model_id": "m" * 2000}, "model_id"),
        ({"model_revision": "r" * 2000}, "model_revision"),
    ],
)
def test_a_setting_that_is_wrong_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        settings(**given)


def test_a_tier_trusts_the_memory_of_its_host_unless_told_otherwise() -> None:
    assert settings().store.trusts_arena
    assert not settings(trusts_arena=False).store.trusts_arena


def test_servers_share_only_where_everything_agrees_that_kv_depends_on() -> None:
    plain = space_id(settings())
    assert plain == space_id(settings(lookup_timeout_s=9.0, known_s=1.0))  # those say nothing of the KV
    others = [
        space_id(settings(model_revision="r2")),
        space_id(settings(model_id="another")),
        space_id(settings(), model=["another length"]),
        space_id(settings(), model=[{"overrides": {"hidden_act": len}}]),  # not what JSON has
        space_id(settings(salt="tenant")),
        space_id(settings(weight_version="7")),
        space_id(settings(), epoch="after a reset"),
        space_id(settings(), size_bytes=8192),
        space_id(settings(), tp_size=2),
        space_id(settings(), root_hash="01"),
        space_id(settings(), model_name="org/other"),
    ]
    assert len({plain, *others}) == len(others) + 1


def test_retention_reaches_chunks_that_the_cluster_is_known_to_have() -> None:
    world, pinned = World(), Retention(pinned_until_us=1 << 60)
    world.jobs.store(world.store, 1, keys("a", "b"), [0, 1])
    world.jobs.ended()
    world.jobs.store(world.store, 2, keys("a", "b"), [0, 1])
    assert world.store.offered == [keys("a", "b")] and not world.store.retained
    world.jobs.store(world.store, 3, keys("a"), [0], pinned)
    assert world.store.retained == [(b"a", pinned)]
    (second, third) = world.jobs.ended()
    assert second.success and third.success and not third.stored, "it was there"


def test_a_look_up_is_asked_once_a_step_and_answered_later() -> None:
    world = World()
    world.store.chunks[b"a"] = b"x"
    assert [world.lookups.verdict(key, "r") for key in keys("a", "b")] == [None, None]
    assert world.lookups.verdict(b"a", "other") is None  # the same key of another request
    assert world.store.asked == []
    world.lookups.flush(world.store)
    assert world.store.asked == [keys("a"), keys("b")]
    assert [world.lookups.verdict(key, "r") for key in keys("a", "b")] == [True, False]
    assert world.lookups.verdict(b"a", "other") is True
    world.lookups.flush(world.store)
    assert len(world.store.asked) == 2


def test_the_first_chunks_of_prompts_are_asked_for_apart() -> None:
    """vLLM asks for no more of a prompt whose first chunk is a miss: an answer about all of them takes longer."""
    world = World()
    world.store.held = True
    for request_id in ("r", "s"):
        for key in keys("a", "b", "c"):
            world.lookups.verdict(request_id.encode() + key, request_id)
    world.lookups.flush(world.store)
    assert world.store.asked == [keys("ra", "sa"), keys("rb", "rc", "sb", "sc")]


def test_a_first_chunk_is_found_together_with_those_behind_it_and_missed_at_once() -> None:
    """vLLM would load it in a job of its own; a miss lets the request go on."""
    world = World()
    world.store.chunks = dict.fromkeys(keys("ra", "rb"), b"x")
    world.store.held = True
    for request_id in ("r", "s"):
        for key in keys("a", "b"):
            world.lookups.verdict(request_id.encode() + key, request_id)
    world.lookups.flush(world.store)
    world.store.release(1)
    assert world.lookups.verdict(b"sa", "s") is False
    assert world.lookups.verdict(b"ra", "r") is None and world.lookups.verdict(b"ra", "other") is None
    assert world.lookups.answers(), "of the others"
    world.store.release()
    assert world.lookups.verdict(b"rb", "r") is None, "all chunks of a step are judged by the same answers"
    world.lookups.flush(world.store)
    assert [world.lookups.verdict(key, "r") for key in keys("ra", "rb")] == [True, True]
    assert world.lookups.verdict(b"ra", "other") is True
    assert world.lookups.verdict(b"sb", "s") is False
    assert not world.lookups.answers()


def test_a_first_chunk_with_no_other_behind_it_does_not_wait_for_those_of_other_requests() -> None:
    world = World()
    world.store.chunks = {b"a": b"x"}
    world.store.held = True
    for key, request_id in ((b"a", "r"), (b"b", "s"), (b"c", "s")):
        world.lookups.verdict(key, request_id)
    world.lookups.flush(world.store)
    world.store.release(1)
    assert world.lookups.verdict(b"a", "r") is True


def test_a_chunk_that_is_not_there_is_asked_again_for_a_later_request() -> None:
    world = World()
    world.lookups.verdict(b"a", "first")
    world.lookups.flush(world.store)
    assert world.lookups.verdict(b"a", "first") is False
    world.store.chunks[b"a"] = b"x"
    assert world.lookups.verdict(b"a", "first") is False  # a request's answer does not change
    assert world.lookups.verdict(b"a", "second") is None
    world.lookups.flush(world.store)
    assert world.lookups.verdict(b"a", "second") is True


def test_a_look_up_without_an_answer_is_a_miss_after_its_time_and_an_answer_that_comes_late_is_kept() -> None:
    world = World()
    world.store.held, world.store.chunks[b"a"] = True, b"x"
    assert world.lookups.verdict(b"a", "r") is None
    world.lookups.flush(world.store)
    world.clock.s += 0.4
    assert world.lookups.verdict(b"a", "r") is None
    world.clock.s += 0.2
    assert world.lookups.verdict(b"a", "r") is False
    assert world.lookups.late_count == 1
    world.store.release()
    world.lookups.flush(world.store)
    assert world.lookups.verdict(b"a", "r") is False
    assert world.lookups.verdict(b"a", "next") is True


def test_requests_wait_for_loads_and_look_ups_that_have_not_ended_and_for_no_store() -> None:
    world = World()
    world.jobs.store(world.store, 1, keys("a", "b"), [0, 1])
    world.store.held = True
    world.jobs.store(world.store, 2, keys("c"), [2])
    assert not world.jobs.loads() and not world.lookups.answers()
    world.jobs.load(world.store, 3, keys("a"), [5])
    world.lookups.verdict(b"x", "request")
    assert not world.lookups.answers(), "it is not asked yet"
    world.lookups.flush(world.store)
    assert len(world.jobs.loads()) == 1 and len(world.lookups.answers()) == 1
    world.store.release()
    assert not world.jobs.loads() and not world.lookups.answers()


class Pauses:
    """What steps did: "wait" for any of so many at their beginning, "yield" at their end."""

    def __init__(self, may_wait: bool = True) -> None:
        self.made: list[object] = []
        self.steps = StepYield(
            may_wait, lambda futures, *_: self.made.append(("wait", len(futures))), lambda _: self.made.append("yield")
        )

    def step(self, running: int, new: Sequence[str] = ()) -> list[object]:
        self.made = []
        self.steps.begin_step([Future() for _ in range(running)])
        self.steps.end_step(new, [Future() for _ in range(running)])
        return self.made


def test_a_step_waits_only_where_nothing_is_computed() -> None:
    pauses = Pauses()
    assert pauses.step(0) == []
    assert pauses.step(3) == [("wait", 3)]
    assert pauses.step(1, new=["b"]) == [("wait", 1), "yield"], "b is scheduled at its end"
    assert pauses.step(1) == ["yield"], "b still is"
    pauses.steps.finish("b")
    assert pauses.step(1) == [("wait", 1)]


@pytest.mark.parametrize("usual_s", [0.005, 0.00001])
def test_threads_wait_less_for_the_interpreter_while_a_request_waits_for_them(usual_s: float) -> None:
    before_s = sys.getswitchinterval()
    try:
        sys.setswitchinterval(usual_s)
        pauses = Pauses()
        pauses.step(0)
        assert sys.getswitchinterval() == pytest.approx(usual_s)
        for _ in range(2):
            pauses.step(1)
            assert sys.getswitchinterval() == pytest.approx(min(usual_s, 0.00005))
        pauses.step(0)
        assert sys.getswitchinterval() == pytest.approx(usual_s)
    finally:
        sys.setswitchinterval(before_s)


def test_a_step_that_other_engines_wait_for_does_not_wait() -> None:
    assert Pauses(may_wait=False).step(1) == ["yield"]


def test_few_look_ups_are_on_their_way_at_once_and_the_rest_goes_together() -> None:
    world = World()
    world.store.held = True
    for number in range(14):
        world.lookups.verdict(b"%d" % number, "r")
        world.lookups.flush(world.store)
    assert [len(batch) for batch in world.store.asked] == [1] * 8
    world.store.release()
    world.lookups.flush(world.store)
    assert [len(batch) for batch in world.store.asked[8:]] == [1, 5]


def test_a_finished_request_leaves_nothing_to_ask_and_a_failed_call_is_a_miss() -> None:
    world = World()
    world.lookups.verdict(b"a", "gone")
    world.lookups.verdict(b"b", "stays")
    world.lookups.finish("gone")
    world.store.error = ServiceUnavailable("no index")
    world.lookups.flush(world.store)
    assert world.store.asked == [keys("b")]
    assert world.lookups.verdict(b"b", "stays") is False


def test_answers_from_before_a_reset_are_not_taken() -> None:
    world = World()
    world.store.held, world.store.chunks[b"a"] = True, b"x"
    world.lookups.verdict(b"a", "r")
    world.lookups.flush(world.store)
    world.lookups.clear()
    world.store.release()
    world.store.held = False
    world.store.chunks.clear()
    assert world.lookups.verdict(b"a", "r") is None
    world.lookups.flush(world.store)
    assert world.lookups.verdict(b"a", "r") is False


def test_chunks_are_stored_and_come_back_into_other_slots() -> None:
    world = World()
    world.jobs.store(world.store, 1, keys("a", "b"), [3, 5])
    [stored] = world.jobs.ended()
    assert (stored.job_id, stored.success, stored.stored, stored.moved_bytes) == (1, True, keys("a", "b"), 2 * CHUNK)
    expected = [world.chunk(3), world.chunk(5)]
    world.jobs.load(world.store, 2, keys("b", "a"), [0, 1])
    [loaded] = world.jobs.ended()
    assert (loaded.success, loaded.loaded, loaded.lost) == (True, keys("b", "a"), [])
    assert [world.chunk(1), world.chunk(0)] == expected
    assert world.jobs.ended() == []


def test_what_the_cluster_has_or_is_getting_is_not_offered_again_and_its_job_ends_at_once() -> None:
    world = World()
    world.store.held = True
    world.jobs.store(world.store, 1, keys("a", "b"), [0, 1])
    world.jobs.store(world.store, 2, keys("b", "a"), [1, 0])
    assert [job.job_id for job in world.jobs.ended()] == [2]
    world.store.release()
    assert [job.job_id for job in world.jobs.ended()] == [1]
    world.jobs.store(world.store, 3, keys("a", "c"), [0, 2])
    world.store.release()
    assert [job.stored for job in world.jobs.ended()] == [keys("c")]
    assert world.store.offered == [keys("a", "b"), keys("c")]
    assert world.jobs.known_chunks == 3
    world.clock.s += 61
    world.jobs.store(world.store, 4, keys("a"), [0])
    assert world.store.offered[-1] == keys("a")


def test_stores_beyond_the_bytes_in_flight_are_refused_at_once_and_taken_later() -> None:
    world = World(store_chunks_max=3)
    world.store.held = True
    world.jobs.store(world.store, 1, keys("a", "b"), [0, 1])
    world.jobs.store(world.store, 2, keys("c", "d", "e"), [2, 3, 4])
    world.jobs.store(world.store, 3, keys("f"), [5])
    [refused] = world.jobs.ended()
    assert (refused.job_id, refused.success, refused.moved_bytes) == (3, False, 0)
    assert world.store.offered == [keys("a", "b"), keys("c")]
    assert (world.jobs.storing_bytes, world.jobs.refused_chunks) == (3 * CHUNK, 3)
    world.store.release()
    assert [(job.job_id, job.success) for job in world.jobs.ended()] == [(1, True), (2, False)]
    assert world.jobs.storing_bytes == 0
    world.store.held = False
    world.jobs.store(world.store, 4, keys("f"), [5])
    assert [job.success for job in world.jobs.ended()] == [True]


def test_chunks_that_were_not_stored_are_wanted_again_once_there_is_room() -> None:
    world = World(store_chunks_max=2)
    world.store.held = True
    world.jobs.store(world.store, 1, keys("a", "b", "c"), [0, 1, 2])
    assert not world.jobs.wants_again()  # no room yet
    world.store.release()
    world.jobs.ended()
    assert world.jobs.wants_again()
    world.store.held = False
    world.jobs.store(world.store, 2, keys("c", "d"), [2, 3])
    world.jobs.ended()
    assert not world.jobs.wants_again() and set(world.store.chunks) == set(keys("a", "b", "c", "d"))


def test_while_the_cluster_takes_nothing_chunks_are_wanted_again_only_now_and_then() -> None:
    world = World()
    world.store.error = ServiceUnavailable("the pagestore was killed")
    for number in range(100):
        if not number or world.jobs.wants_again():
            world.jobs.store(world.store, number, keys("a"), [0])
            world.jobs.ended()
        world.clock.s += FAILED_PAUSE_S / 10
    assert 5 <= len(world.store.offered) <= 10
    world.store.error = None
    world.clock.s += 2 * FAILED_PAUSE_S
    assert world.jobs.wants_again()
    world.jobs.store(world.store, 100, keys("a"), [0])
    world.jobs.ended()
    assert not world.jobs.wants_again()


def test_chunks_that_a_request_is_not_to_store_are_wanted_from_others_unless_the_cluster_has_them() -> None:
    world = World()
    world.jobs.store(world.store, 1, keys("a"), [0])
    world.jobs.ended()
    world.jobs.lack(keys("a"))
    assert not world.jobs.wants_again()
    world.jobs.lack(keys("a", "b"))
    assert world.jobs.wants_again()
    world.jobs.store(world.store, 2, keys("a", "b"), [0, 1])
    world.jobs.ended()
    assert not world.jobs.wants_again()


def test_chunks_that_the_cluster_has_are_not_lacking_if_a_retention_finds_no_room() -> None:
    world, names = World(store_chunks_max=2), keys("a", "b", "c", "d")
    for job_id, first in enumerate((0, 2)):
        world.jobs.store(world.store, job_id, names[first : first + 2], [first, first + 1])
        world.jobs.ended()
    world.jobs.store(world.store, 9, names, range(4), Retention(priority=5))
    [ended] = world.jobs.ended()
    assert ended.success and not world.jobs.wants_again() and not world.jobs.refused_chunks


@pytest.mark.parametrize("how", ["stored", "loaded"])
def test_a_chunk_that_the_cluster_has_by_another_engine_is_not_wanted_any_more(how: str) -> None:
    world = World(store_chunks_max=2)
    world.jobs.store(world.store, 1, keys("a", "b", "c"), [0, 1, 2])
    world.jobs.ended()
    assert world.jobs.wants_again()
    world.store.chunks[b"c"] = b"C" * CHUNK
    if how == "loaded":
        world.jobs.load(world.store, 2, keys("c"), [2])
        world.jobs.ended()
    else:
        world.known.add(keys("c"))
        world.jobs.store(world.store, 2, keys("a", "b", "c"), [0, 1, 2])
    assert not world.jobs.wants_again()


def test_what_is_wanted_again_is_forgotten_after_a_time_when_it_has_left_the_region_and_at_a_reset() -> None:
    world, many = World(store_chunks_max=1), [b"%d" % number for number in range(40)]
    world.jobs.store(world.store, 1, many, [0] * 40)
    world.jobs.ended()
    for number, key in enumerate(many[-16:]):
        world.jobs.store(world.store, 2 + number, [key], [0])
        world.jobs.ended()
    assert not world.jobs.wants_again()  # the first ones have left the region by now
    world.jobs.store(world.store, 100, keys("a", "b"), [0, 1])
    world.jobs.ended()
    assert world.jobs.wants_again()
    world.clock.s += LACKING_S + 1
    assert not world.jobs.wants_again()
    world.jobs.store(world.store, 101, keys("c", "d"), [0, 1])
    world.jobs.ended()
    assert world.jobs.wants_again()
    world.jobs.forget()
    assert not world.jobs.wants_again()


def test_a_load_names_the_chunks_that_came_and_those_are_misses_that_did_not() -> None:
    world = World()
    world.store.chunks |= {b"a": b"A" * CHUNK}
    world.known.add(keys("a", "b"))
    assert world.lookups.verdict(b"b", "r") is True
    world.jobs.load(world.store, 1, keys("a", "b"), [0, 1])
    [ended] = world.jobs.ended()
    assert (ended.success, ended.loaded, ended.lost) == (False, keys("a"), keys("b"))
    world.lookups.mark_missing(ended.lost)
    assert world.lookups.verdict(b"b", "r") is False
    assert b"b" not in world.known


def test_a_copy_that_fails_ends_its_job_and_frees_its_room() -> None:
    world = World(store_chunks_max=1)
    world.store.error = ServiceUnavailable("the pagestore was killed")
    world.jobs.store(world.store, 1, keys("a"), [0])
    world.jobs.load(world.store, 2, keys("b"), [1])
    assert [(job.job_id, job.success, job.lost) for job in world.jobs.ended()] == [(1, False, ()), (2, False, [b"b"])]
    world.store.error = None
    world.jobs.store(world.store, 3, keys("a"), [0])
    assert [job.success for job in world.jobs.ended()] == [True]
