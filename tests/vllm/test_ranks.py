"""Tensor parallelism: each rank stores and loads its heads, and other degrees read what it wrote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, Engine, Engines, agent_of, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
TOKENS = prompt(5 * CHUNK + 50, seed=80)


@pytest.fixture(scope="module")
def two_ranks(engines: Engines, cluster: Cluster) -> Iterator[Engine]:
    """An engine of two ranks, each with one of the model's two KV heads."""
    with engines.start(agent=agent_of(cluster), tensor_parallel_size=2, distributed_executor_backend="mp") as engine:
        yield engine


def test_two_ranks_load_what_they_have_stored(two_ranks: Engine, alone: Engine) -> None:
    two_ranks.probe("watch_jobs")
    assert two_ranks.generate(TOKENS, salt="ranks").tokens == alone.generate(TOKENS).tokens
    two_ranks.await_stored(2 * 5)  # of each rank
    two_ranks.forget()
    found = two_ranks.generate(TOKENS, salt="ranks")
    assert found.tokens == alone.generate(TOKENS).tokens
    assert found.cached == [5 * CHUNK]
    assert two_ranks.counters()["loaded_chunks"] == 2 * 5
    digests = []
    for jobs in two_ranks.probe("job_blocks"):
        stored, loaded = ([blocks for kind, blocks in jobs if kind == wanted] for wanted in ("store", "load"))
        assert len(loaded) == 1
        assert len(set(loaded[0])) == len(loaded[0]) == 5 * CHUNK // 32
        digests.append(loaded[0])
        assert stored
    assert not set(digests[0]) & set(digests[1])  # the ranks have different heads


def test_one_rank_and_two_read_each_others_chunks(
    two_ranks: Engine, pair: tuple[Engine, Engine], alone: Engine
) -> None:
    one_rank = pair[1]
    for writer, reader, salt in ((one_rank, two_ranks, "of one"), (two_ranks, one_rank, "of two")):
        stored = int(writer.counters()["stored_chunks"])
        writer.generate(TOKENS, salt=salt)
        writer.await_stored(stored + (10 if writer is two_ranks else 5))
        found = reader.generate(TOKENS, salt=salt)
        assert found.cached == [5 * CHUNK]
        assert found.tokens == alone.generate(TOKENS).tokens
