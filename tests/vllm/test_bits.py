"""bfloat16, where tokens depend on how a prefix was computed: the KV itself is compared, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import CHUNK, Engine, Engines, agent_of, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
SHARED = prompt(5 * CHUNK, seed=1)
LONGER = SHARED + prompt(50, seed=2)


def ordered(engine: Engine, kind: str) -> list[str]:
    """Digests of the blocks that were stored or loaded, in the order of their tokens."""
    (jobs,) = engine.probe("job_blocks")
    found = [blocks for job_kind, blocks in jobs if job_kind == kind]
    assert len(found) == 1
    return list(found[0])


@pytest.mark.parametrize("block_tokens", [32, 128])
def test_bfloat16_comes_back_bit_for_bit(engines: Engines, cluster: Cluster, block_tokens: int) -> None:
    arguments: dict[str, Any] = {"block_size": block_tokens, "dtype": "bfloat16"}
    with engines.start(**arguments) as alone:
        alone.generate(SHARED)
        expected = alone.generate(LONGER)
        assert expected.cached == [5 * CHUNK]  # of its own
    agent = agent_of(cluster)
    with engines.start(agent=agent, **arguments) as first, engines.start(agent=agent, **arguments) as second:
        for engine in (first, second):
            engine.probe("watch_jobs")
        # On a GPU pages do not depend on the size of blocks: without a salt they would have been stored already.
        first.generate(SHARED, salt=str(block_tokens))
        stored = ordered(first, "store")
        first.await_stored(5)
        found = second.generate(LONGER, salt=str(block_tokens))
        loaded = ordered(second, "load")
    assert (found.tokens, found.cached) == (expected.tokens, expected.cached)
    assert loaded == stored
    assert len(set(loaded)) == len(loaded) == 5 * CHUNK // block_tokens
