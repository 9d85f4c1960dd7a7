"""Everything restarts in any order while requests are served: all end well, and then prefixes are shared again."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis, RedisError

from kvpool.testing import eventually_sync
from kvpool_cli.cluster import socket_dir
from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, Engine, Engines, agent_of, prompt
from tests.vllm.faults import pid_of
from tests.vllm.models import make_mamba_model, make_model, make_windowed_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
RECOVERY_S = 100.0
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Kind:
    """blocks: of one engine's cache, so few that requests wait for each other and are preempted too."""

    make: Callable[[Path], Path]
    blocks: int
    block: int = 32

    @property
    def arguments(self) -> dict[str, Any]:
        return {"num_gpu_blocks_override": self.blocks, "block_size": self.block, "max_model_len": 2048}


KINDS = {
    "one group": Kind(make_model, 80),
    "windows": Kind(make_windowed_model, 200),
    "states": Kind(make_mamba_model, 60, block=CHUNK),
}


class Fleet:
    """Two engines that share, plain vLLM, and the prompts that they serve."""

    def __init__(self, stack: ExitStack, kind: Kind, engines: Engines, cluster: Cluster) -> None:
        self._stack, self._kind, self._engines, self._cluster = stack, kind, engines, cluster
        self._alone = stack.enter_context(engines.start(enable_prefix_caching=False, **kind.arguments))
        self._members = [self._start(), self._start()]
        self._expected: dict[tuple[int, ...], list[int]] = {}
        self._numbers = itertools.count(1000)
        self._begun: list[tuple[Engine, int, list[list[int]]]] = []
        self._prefixes = [prompt(4 * CHUNK, seed=seed) for seed in (70, 71)]

    def begin(self, order: random.Random) -> None:
        """Have both engines begin some requests: prefixes that all have, with tails of their own."""
        for engine in self._members:
            prompts = [
                order.choice(self._prefixes)[: order.randrange(2, 5) * CHUNK] + prompt(order.randrange(1, 90), seed)
                for seed in itertools.islice(self._numbers, 3)
            ]
            self._begun.append((engine, engine.begin(*prompts, salt="restarts"), prompts))

    def check(self) -> None:
        """Wait for what was begun: tokens are those of plain vLLM."""
        while self._begun:
            engine, number, prompts = self._begun.pop()
            assert engine.generated(number).tokens == self._alone.generate(*prompts).tokens

    def replace_one(self) -> None:
        """Kill an engine with the requests that it has; another comes in its place."""
        victim = self._members.pop(0)
        victim.kill()
        self._begun = [entry for entry in self._begun if entry[0] is not victim]
        self._members.append(self._start())

    def shares_again(self) -> bool:
        """Whether the second engine finds what the first has computed just now."""
        first, second = self._members
        tokens = prompt(2 * CHUNK + 5, next(self._numbers))
        first.generate(tokens)
        first.counters()  # a step, in which the store begins
        first.forget()
        return second.generate(tokens).cached == [2 * CHUNK]

    def _start(self) -> Engine:
        engine = self._engines.start(
            agent=agent_of(self._cluster),
            as_shipped=True,
            extra={"load": "always"},
            enable_prefix_caching=True,  # by default vLLM has none for models with states
            **self._kind.arguments,
        )
        return self._stack.enter_context(engine)


@pytest.fixture(scope="module", params=list(KINDS))
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cluster: Cluster
) -> Iterator[Fleet]:
    """Ends all engines that it has started."""
    kind = KINDS[request.param]
    with Engines(kind.make(tmp_path_factory.mktemp("model"))) as engines, ExitStack() as stack:
        yield Fleet(stack, kind, engines, cluster)


def flush(cluster: Cluster) -> None:
    """All that the Redis holds is gone, as soon as it runs."""

    def flushed() -> bool:
        try:
            with Redis(unix_socket_path=str(socket_dir(cluster.state_dir) / "redis.sock")) as redis:
                return bool(redis.flushall())
        except RedisError:
            return False

    eventually_sync(flushed, deadline_s=RECOVERY_S)


def kill(cluster: Cluster, role: str) -> None:
    """A service, as soon as it runs."""

    def runs() -> bool:
        return all(process.alive() for process in cluster.state.of_role(role))

    eventually_sync(runs, deadline_s=RECOVERY_S)
    os.kill(pid_of(cluster, role), signal.SIGKILL)


@pytest.mark.parametrize("seed", [1, 2])
def test_requests_end_well_whatever_restarts(fleet: Fleet, cluster: Cluster, seed: int) -> None:
    order = random.Random(seed)
    actions = [
        *("redis", "index", "agent", "pagestore") * ROUNDS,
        *("flush",) * ROUNDS,
        "engine",
    ]
    order.shuffle(actions)
    for action in actions:
        fleet.begin(order)
        if action == "engine":
            fleet.replace_one()
        elif action == "flush":
            flush(cluster)
        else:
            kill(cluster, action)
        fleet.begin(order)
        if order.random() < 0.6:  # else the next thing happens on top
            fleet.check()
    fleet.check()
    eventually_sync(fleet.shares_again, deadline_s=RECOVERY_S)
