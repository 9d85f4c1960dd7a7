"""What vLLM publishes of the pool: chunks, beside its own blocks."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.testing import eventually_sync
from tests.vllm.engine import CHUNK, Engine, prompt

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def of_pool(engine: Engine, kind: str) -> list[dict[str, Any]]:
    """Events of one kind that kvpool made."""
    return [event for event in engine.published() if event["kind"] == kind and event.get("medium") == "STORAGE"]


@pytest.mark.smoke
def test_vllm_publishes_the_chunks_that_come_into_the_pool(pair: tuple[Engine, Engine]) -> None:
    engine, tokens = pair[0], prompt(3 * CHUNK + 5, seed=95)
    before = len(of_pool(engine, "BlockStored"))
    stored = int(engine.counters()["stored_chunks"])
    engine.generate(tokens, salt="events")
    engine.await_stored(stored + 3)
    eventually_sync(lambda: len(of_pool(engine, "BlockStored")) > before)
    (event,) = of_pool(engine, "BlockStored")[before:]
    assert event["token_ids"] == tokens[: 3 * CHUNK]
    assert event["block_size"] == CHUNK
    assert len(set(event["block_hashes"])) == 3
    assert event["parent_block_hash"] is None
    assert event["ownership"] == "kvpool"
    # Of the same tokens vLLM published its own blocks.
    own = [one for one in engine.published() if one["kind"] == "BlockStored" and one["medium"] != "STORAGE"]
    assert any(one["block_size"] == 32 and one["token_ids"][:32] == tokens[:32] for one in own)
