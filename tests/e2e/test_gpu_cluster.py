"""A cluster whose agent serves a GPU: bytes survive the death of agent and pagestore, and a model's tokens stay equal.

The tests on the CPU do the same with shared memory: what they have in common is seen to work where there is no GPU.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.client.engine_items import LoadResult
from kvpool.client.engine_registration import EngineRegistration
from kvpool.client.sync import Pool
from kvpool.connectors.block_memory import BlockMemory, block_memory
from kvpool.connectors.transformers import GenerationResult, SharedPrefixGenerator
from kvpool.connectors.transformers_blocks import block_layout
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.testing import eventually_sync
from kvpool_cli.state import ProcessState
from tests.e2e.cli_cluster import Cluster
from tests.fixtures.patience import PATIENCE_S, patient
from tests.unit.connectors.tiny_models import prompt, tiny_llama

pytestmark = pytest.mark.e2e

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = patient()
SPEC = KeyspaceSpec(model_id="raw", model_revision="1", groups=(KvGroup(8, 4, 64),), dtype=Dtype.BF16, chunk_tokens=64)
CHUNK_COUNT = 8
TOKENS = list(range(1000, 1000 + CHUNK_COUNT * SPEC.chunk_tokens + 1))
CHUNK = 16
NEW_TOKENS = 8
RECOVERY_S = 100.0


class RawEngine:
    """A rank that keeps random bytes for KV, in the memory of its device."""

    def __init__(self, cluster: Cluster, device: str) -> None:
        layout = block_layout(SPEC, CHUNK_COUNT)
        self.memory: BlockMemory = block_memory(layout.handle_sizes[0], torch.device(device))
        plan = EngineRegistration(
            endpoint=agent_of(cluster),
            engine_name="raw",
            keyspace_name=f"raw-{device}",
            spec=SPEC,
            layout=layout,
            regions=self.memory.regions,
            events=self.memory.events,
        )
        self.pool = Pool(plan, CONFIG)
        self.chain = self.pool.prompt(TOKENS)

    @property
    def bytes(self) -> torch.Tensor:
        """All blocks, as they are now."""
        memory = self.memory.bytes_of()
        return memory if isinstance(memory, torch.Tensor) else torch.frombuffer(memory, dtype=torch.uint8)

    def store(self) -> None:
        """Store what the blocks hold, after the work that the current stream has to do on them."""
        handle = self.pool.store(
            self.chain,
            np.arange(CHUNK_COUNT),
            first_chunk=0,
            end_chunk=CHUNK_COUNT,
            wait_event=self.memory.record_event(),
        )
        report = handle.result(60)
        assert report.stored_chunks == CHUNK_COUNT, report

    def load(self) -> LoadResult:
        return self.pool.load(
            self.chain,
            np.arange(CHUNK_COUNT),
            first_chunk=0,
            end_chunk=CHUNK_COUNT,
            wait_event=self.memory.record_event(),
        )

    def close(self) -> None:
        self.pool.close()
        self.memory.close(untouched=True)


@contextmanager
def raw_engine(cluster: Cluster, device: str) -> Iterator[RawEngine]:
    engine = RawEngine(cluster, device)
    try:
        yield engine
    finally:
        engine.close()


def agent_of(cluster: Cluster) -> str:
    return f"unix:{cluster.state.of_role('agent')[0].endpoints['socket']}"


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(device: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One host."""
    cluster = Cluster(tmp_path_factory.mktemp(f"cluster-{device}"))
    sizes = ("--arena-bytes", "128MiB", "--disk-bytes", "512MiB")
    try:
        cluster.run("cluster", "up", "--device", device, "--detach", *sizes)
        yield cluster
    finally:
        cluster.run("cluster", "down")


def kill(cluster: Cluster, *roles: str) -> list[ProcessState]:
    """SIGKILL; the supervisor starts them again. Returns who is gone."""
    gone = [cluster.state.of_role(role)[0] for role in roles]
    for process in gone:
        os.kill(process.pid, signal.SIGKILL)
    return gone


def await_restart(cluster: Cluster, gone: list[ProcessState]) -> None:
    """Others with the same names serve."""
    dead = {process.pid for process in gone}

    def restarted() -> bool:
        state = cluster.state
        return all(
            process.alive() and process.pid not in dead
            for process in state.processes
            if process.name in {one.name for one in gone}
        )

    eventually_sync(restarted, deadline_s=RECOVERY_S)


def test_bytes_survive_the_death_of_agent_and_pagestore(cluster: Cluster, device: str) -> None:
    with raw_engine(cluster, device) as first:
        assert first.pool.pool.session.device == device
        first.bytes.random_(0, 256)
        expected = first.bytes.cpu().clone()
        first.store()
        cluster.run("cache", "flush")
        await_restart(cluster, kill(cluster, "agent", "pagestore"))
        # The engine that was there before: its session is opened again.
        first.bytes.zero_()
        load_all(first)
        assert torch.equal(first.bytes.cpu(), expected)
    with raw_engine(cluster, device) as second:
        second.bytes.zero_()
        load_all(second)
        assert torch.equal(second.bytes.cpu(), expected)


def load_all(engine: RawEngine) -> None:
    """Once the cluster has all chunks again."""
    eventually_sync(lambda: engine.pool.match(engine.chain).matched_chunks == CHUNK_COUNT, deadline_s=RECOVERY_S)
    eventually_sync(lambda: engine.load().loaded_chunks == CHUNK_COUNT, deadline_s=RECOVERY_S)


def test_a_store_comes_after_the_work_that_computes_the_blocks(cluster: Cluster, device: str) -> None:
    """The bytes are written by work that takes long, and stored before it has ended."""
    with raw_engine(cluster, device) as engine:
        tokens = [token + 1 for token in TOKENS]
        engine.chain = engine.pool.prompt(tokens)
        engine.bytes.zero_()
        busy = torch.ones((4096, 4096) if device == "cuda" else (64, 64), device=device)
        for _ in range(200 if device == "cuda" else 2):
            busy = busy @ busy * 0.0 + 1.0
        engine.bytes.copy_((busy.flatten()[0] * 7).to(torch.uint8).expand_as(engine.bytes))
        engine.store()
        engine.bytes.zero_()
        load_all(engine)
        assert bool((engine.bytes == 7).all())


@pytest.fixture(scope="module")
def model(device: str) -> Any:
    return tiny_llama().to(device)


def connect(cluster: Cluster, model: Any) -> SharedPrefixGenerator:
    return SharedPrefixGenerator.connect(
        model,
        agent_of(cluster),
        model_id="tiny",
        model_revision="1",
        keyspace_name=f"tiny-{model.device.type}",
        chunk_tokens=CHUNK,
        cache_bytes=4 << 20,
        match_timeout_s=PATIENCE_S,
        connect_timeout_s=PATIENCE_S,
        always_load=True,
    )


def run(generator: SharedPrefixGenerator, input_ids: torch.Tensor) -> GenerationResult:
    return generator.generate(input_ids, max_new_tokens=NEW_TOKENS, do_sample=False)


def alone(model: Any, input_ids: torch.Tensor) -> list[int]:
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    tokens: list[int] = output[0].tolist()
    return tokens


def test_a_model_computes_where_it_is_and_shares_its_prefixes(cluster: Cluster, model: Any) -> None:
    input_ids = prompt(6 * CHUNK + 3, seed=1).to(model.device)
    expected = alone(model, input_ids)
    with connect(cluster, model) as first:
        cold = run(first, input_ids)
        assert first.flush_stores(60)
        own = run(first, input_ids)
    with connect(cluster, model) as second:
        eventually_sync(lambda: second.available_tokens(input_ids) == 6 * CHUNK, deadline_s=RECOVERY_S)
        loaded = run(second, input_ids)
    for result in (cold, own, loaded):
        assert result.sequences[0].tolist() == expected
        assert result.stats.failure == ""
    assert own.stats.prompt_tokens.own == 6 * CHUNK
    assert loaded.stats.prompt_tokens.staging == 6 * CHUNK


def test_an_agent_killed_under_a_model_costs_recomputing_only(cluster: Cluster, model: Any) -> None:
    before, after = (prompt(5 * CHUNK, seed=seed).to(model.device) for seed in (2, 3))
    with connect(cluster, model) as generator:
        run(generator, before)
        assert generator.flush_stores(60)
        gone = kill(cluster, "agent")
        assert run(generator, after).sequences[0].tolist() == alone(model, after)
        await_restart(cluster, gone)

        def pooled() -> bool:
            """Stored with a later request, once the agent is back and the memory is its own to map again."""
            run(generator, after)
            generator.flush_stores(PATIENCE_S)
            with connect(cluster, model) as other:
                return other.available_tokens(after) >= 4 * CHUNK

        eventually_sync(pooled, deadline_s=RECOVERY_S)
