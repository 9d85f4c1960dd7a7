"""What dies or goes away under a load costs the engine time only: bench/vllm_ttft.py says how much."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, Engine, prompt
from tests.vllm.faults import damage_disk, load_is_running, pid_of, stopped_chunks, stored

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
RECOVERY_S = 100.0


@pytest.fixture
def engine(pair: tuple[Engine, Engine]) -> Engine:
    """One that shares."""
    return pair[1]


@contextmanager
def load_under_way(cluster: Cluster, engine: Engine, tokens: list[int], salt: str) -> Iterator[int]:
    """A generation whose load is under way for certain: its pagestore is stopped until the end of the block."""
    eventually_sync(lambda: stored(engine, tokens, salt), deadline_s=RECOVERY_S)
    engine.forget()
    pagestore = pid_of(cluster, "pagestore")
    os.kill(pagestore, signal.SIGSTOP)
    try:
        number = engine.begin(tokens, salt=salt)
        eventually_sync(load_is_running(cluster), deadline_s=60.0)
        yield number
    finally:
        with suppress(ProcessLookupError):  # it may be killed
            os.kill(pagestore, signal.SIGCONT)


@pytest.mark.parametrize("victim", ["pagestore", pytest.param("agent", marks=pytest.mark.smoke)])
def test_what_is_killed_during_a_load_costs_recomputing_only(
    cluster: Cluster, engine: Engine, alone: Engine, victim: str
) -> None:
    tokens = prompt(8 * CHUNK + 20, seed=40)
    expected = alone.generate(tokens).tokens
    with load_under_way(cluster, engine, tokens, f"killed {victim}") as number:
        os.kill(pid_of(cluster, victim), signal.SIGKILL)
        assert engine.generated(number).tokens == expected
    # The engine goes on, and shares again once all is back.
    eventually_sync(lambda: stored(engine, prompt(3 * CHUNK, seed=50), victim), deadline_s=RECOVERY_S)


@pytest.mark.smoke
def test_a_request_that_is_aborted_during_its_load_leaves_nothing_behind(
    cluster: Cluster, engine: Engine, alone: Engine
) -> None:
    tokens = prompt(8 * CHUNK + 20, seed=41)
    expected = alone.generate(tokens).tokens
    stopped_before = stopped_chunks(cluster)
    with load_under_way(cluster, engine, tokens, "aborted") as number:
        engine.abort(number)
        other = prompt(100, seed=42)
        assert engine.generate(other).tokens == alone.generate(other).tokens  # nobody waits for it
        engine.forget()  # its blocks have come back, though nothing comes from the pagestore
        assert not load_is_running(cluster)()
        assert stopped_chunks(cluster) == stopped_before + 8
    again = engine.generate(tokens, salt="aborted")
    assert again.tokens == expected
    assert again.cached == [8 * CHUNK]


def test_requests_that_are_aborted_at_any_moment_disturb_no_others(engine: Engine, alone: Engine) -> None:
    shared, order = prompt(3 * CHUNK, seed=43), random.Random(1)
    prompts = [shared[: order.randrange(1, 3) * CHUNK] + prompt(60, seed=100 + number) for number in range(16)]
    expected = [alone.generate(one).tokens for one in prompts]
    for number in range(3):
        engine.forget()
        begun = {index: engine.begin(prompts[index], salt="any moment") for index in range(len(prompts))}
        leaving = order.sample(sorted(begun), 8)
        for index in leaving:
            engine.generate(prompt(order.randrange(1, 40), seed=number), new_tokens=1)  # steps go by
            engine.leave(begun.pop(index))
        assert [engine.generated(at).tokens for at in begun.values()] == [expected[index] for index in begun]
    engine.forget()


def test_a_damaged_page_costs_its_chunk_and_those_behind(cluster: Cluster, engine: Engine, alone: Engine) -> None:
    tokens = prompt(8 * CHUNK + 20, seed=60)
    expected = alone.generate(tokens).tokens
    eventually_sync(lambda: stored(engine, tokens, "damaged"), deadline_s=RECOVERY_S)
    engine.forget()
    failed = engine.counters()["failed_load_chunks"]
    damage_disk(cluster)
    assert engine.generate(tokens, salt="damaged").tokens == expected
    assert engine.counters()["failed_load_chunks"] > failed
