"""A generator on a scripted pool."""

from typing import Any

from kvpool.connectors.prefix_cache import PrefixCache
from kvpool.connectors.transformers import SharedPrefixGenerator
from kvpool.connectors.transformers_blocks import KvBlocks, block_bytes
from kvpool.connectors.transformers_model import shared_model
from tests.unit.connectors.scripted_pool import ScriptedPool

CHUNK = 16


def generator_over(model: Any, pool: ScriptedPool, *, block_count: int = 32) -> SharedPrefixGenerator:
    """An engine of its own, with its own blocks, on a scripted pool."""
    spec = shared_model(model, model_id="tiny", model_revision="1", chunk_tokens=CHUNK).spec
    pool.memory = memoryview(bytearray(block_count * block_bytes(spec)))
    pool.block_bytes, pool.chunk_tokens = block_bytes(spec), CHUNK
    blocks = KvBlocks(spec, block_count, pool.memory)
    cache = PrefixCache(
        pool,
        block_count=block_count,
        chunk_tokens=CHUNK,
        chunk_bytes=block_bytes(spec),
        always_load=True,  # the speed of the machine is no matter here
    )
    return SharedPrefixGenerator(model, blocks, cache, pool)
