"""Prefixes that vLLM's connector copies out of another engine's GPU cache: two engine processes, an agent for each.

Both are on one GPU where there is only one; the pool has none of what is loaded here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvpool.testing import eventually_sync
from tests.fixtures.gpu_cluster import EngineChild, GpuHost
from tests.fixtures.vllm_caches import CHUNK

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(170)]

MODULE = "vllm_engine_process"
CHUNKS = 4
RECOVERY_S = 60.0
Shape = dict[str, Any]
BLHNC: Shape = {"layout": "BLHNC", "block_tokens": 16}
PAIRS: list[tuple[Shape, Shape]] = [
    (BLHNC, BLHNC),
    ({"layout": "LBNHC", "block_tokens": 16}, {"layout": "BLHNC", "block_tokens": 32}),
    ({"layout": "BHLNC", "block_tokens": 128}, {"layout": "LBHNC", "block_tokens": 16}),
    ({"layout": "LBNHC", "block_tokens": 64, "mla": True}, {"layout": "BLHNC", "block_tokens": 16, "mla": True}),
    ({"layout": "LBNHC", "block_tokens": 128, "kernel_block_tokens": 16}, {"layout": "BLNHC", "block_tokens": 128}),
]


class Pair:
    """A source and a rank that copies from it, each with its agent."""

    def __init__(self, host: GpuHost) -> None:
        self.host, self.cluster = host, host.cluster
        self.devices = {"source": "cuda:0", "rank": f"cuda:{host.second_gpu}"}
        self.children: dict[str, EngineChild] = {}
        for name in self.devices:
            self.start_agent(name)
            self.start_engine(name)
        for name in self.devices:
            self.cluster.agents[self.agent(name)].wait_ready()
            self.children[name].wait_event("started")
        self._seed = 20_000

    def agent(self, name: str) -> str:
        return f"pull-{name}"

    def start_agent(self, name: str) -> None:
        ordinal = self.devices[name].removeprefix("cuda:")
        self.cluster.agent(self.agent(name), "cuda", device_ordinal=ordinal)

    def start_engine(self, name: str) -> EngineChild:
        self.children[name] = self.cluster.engine(f"vllm pull {name}", module=MODULE)
        return self.children[name]

    def open(self, name: str, shape: Shape, rank: str = "") -> None:
        endpoint = self.host.endpoint(self.agent(name))
        opened = self.children[name].ask(
            "open", rank=rank or name, endpoint=endpoint, device=self.devices[name], **shape
        )
        assert opened

    def seed(self) -> int:
        self._seed += 10
        return self._seed

    def announce(self, seed: int, chunks: int = CHUNKS, rank: str = "source", **options: Any) -> None:
        self.children["source"].ask("announce", rank=rank, seed=seed, chunks=chunks, **options)

    def load(self, seed: int, chunks: int = CHUNKS, at: int = 5, rank: str = "rank") -> dict[str, Any]:
        """Into blocks of NaN."""
        child = self.children["rank"]
        child.ask("begin_load", rank=rank, seed=seed, chunks=chunks, at=at, from_gpu=True)
        ended: dict[str, Any] = child.ask("end_load", rank=rank)
        assert ended["gpu_tokens"] == ended["loaded"] * CHUNK  # the pool has nothing
        return ended

    def loads(self, seed: int, chunks: int = CHUNKS, rank: str = "rank", loaded: int | None = None) -> None:
        """Until so many chunks come: announcements are not answered, and agents that were down are left alone."""
        wanted = chunks if loaded is None else loaded
        eventually_sync(lambda: self.load(seed, chunks, rank=rank)["loaded"] == wanted, RECOVERY_S)
        if wanted:
            held = self.children["rank"].ask("holds", rank=rank, seed=seed, chunks=wanted, at=5)
            assert held["loaded"]

    def share(self) -> int:
        """Have the rank load chunks that the source has announced, both with vLLM's usual layout; their seed."""
        for name in self.devices:
            self.open(name, BLHNC)
        seed = self.seed()
        self.announce(seed)
        self.loads(seed)
        return seed

    def close(self) -> None:
        for name, child in self.children.items():
            child.kill()
            self.cluster.agents.pop(self.agent(name)).kill()


@pytest.fixture(scope="module")
def started(host: GpuHost) -> Iterator[Pair]:
    pair = Pair(host)
    yield pair
    pair.close()


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    yield started
    for child in started.children.values():
        child.ask("close_all")


@pytest.mark.parametrize(("theirs", "own"), PAIRS)
def test_every_byte_comes_into_poisoned_blocks_and_no_other_block_is_touched(
    pair: Pair, theirs: Shape, own: Shape
) -> None:
    pair.open("source", theirs)
    pair.open("rank", own)
    seed = pair.seed()
    pair.announce(seed, at=2)
    pair.loads(seed)
    held = pair.children["rank"].ask("holds", rank="rank", seed=seed, chunks=CHUNKS, at=5)
    assert held == {"loaded": True, "beside": True}


def test_halves_of_the_heads_make_a_whole_and_the_other_way_round(pair: Pair) -> None:
    for number in range(2):
        pair.open("source", BLHNC | {"tp_rank": number, "tp_size": 2}, rank=f"half {number}")
        pair.open(
            "rank", {"layout": "LBNHC", "block_tokens": 32, "tp_rank": number, "tp_size": 2}, rank=f"own {number}"
        )
    pair.open("rank", BLHNC)
    seed = pair.seed()
    pair.announce(seed, rank="half 0")
    assert pair.load(seed)["loaded"] == 0
    pair.announce(seed, rank="half 1")
    pair.loads(seed)
    for number in range(2):
        pair.loads(seed, rank=f"own {number}")


def test_what_was_given_away_is_not_loaded(pair: Pair) -> None:
    seed = pair.share()
    pair.children["source"].ask("give_away", rank="source", at=2, chunks=1)
    pair.loads(seed, loaded=2)
    pair.announce(seed)
    pair.loads(seed)


def test_a_source_that_gives_blocks_away_all_the_time_is_never_copied_wrong(pair: Pair) -> None:
    pair.open("source", BLHNC)
    pair.open("rank", {"layout": "LBNHC", "block_tokens": 16})
    seed, loaded = pair.seed(), 0
    pair.announce(seed, 6)
    with ThreadPoolExecutor(1) as thread:
        churning = thread.submit(pair.children["source"].ask, "churn", rank="source", seed=seed, chunks=6, seconds=10.0)
        while not churning.done():
            count = pair.load(seed, 6)["loaded"]
            loaded += count
            if count:
                held = pair.children["rank"].ask("holds", rank="rank", seed=seed, chunks=count, at=5)
                assert held["loaded"]
        assert churning.result() > 10
    assert loaded > 0


@pytest.mark.parametrize("attempt", range(3))
def test_a_source_engine_that_is_killed_and_started_again_costs_no_load_more_than_its_chunks(
    pair: Pair, attempt: int
) -> None:
    seed = pair.share()
    pair.children["source"].kill()
    ended = pair.load(seed)
    if ended["loaded"]:  # before its agent knew: memory that is mapped keeps its bytes
        assert pair.children["rank"].ask("holds", rank="rank", seed=seed, chunks=ended["loaded"], at=5)["loaded"]
    pair.loads(seed, loaded=0)
    pair.start_engine("source").wait_event("started")
    pair.open("source", BLHNC)
    pair.loads(seed, loaded=0)
    pair.announce(seed)
    pair.loads(seed)


@pytest.mark.parametrize("attempt", range(3))
@pytest.mark.parametrize("name", ["source", "rank"])
def test_an_agent_that_is_killed_and_started_again_on_its_socket_brings_no_wrong_byte(
    pair: Pair, name: str, attempt: int
) -> None:
    seed = pair.share()
    agent = pair.cluster.agents[pair.agent(name)]
    agent.kill()
    pair.load(seed)
    agent.start()
    agent.wait_ready()
    eventually_sync(lambda: pair.children[name].ask("connected", rank=name), RECOVERY_S)
    pair.announce(seed)
    pair.loads(seed)


def test_an_agent_that_hangs_delays_a_match_for_a_moment_only(pair: Pair) -> None:
    seed, pid = pair.share(), pair.cluster.agents[pair.agent("source")].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert pair.load(seed)["loaded"] == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    pair.loads(seed)
