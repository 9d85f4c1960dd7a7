"""The one content of every page of the simulation: what a reader gets can be checked without asking anybody."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import lru_cache
from unittest import mock

from kvpool.core import grid
from kvpool.core.cluster import CHAIN_GROUP_CHUNKS, PageMetadata
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup, encode_keyspace, keyspace_id
from kvpool.core.page import PageKey, page_bytes, seal
from kvpool.core.payload import payload_bytes


def small_shards() -> AbstractContextManager[object]:
    """Shards of 1 KiB. True ones have 64 KiB at least, and simulated bytes cost real time."""
    return mock.patch.object(grid, "SMALLEST_COLUMN_BYTES", 1 << 10)


TENANT = "tenant"
SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(1, 2, 8),), dtype=Dtype.FP32, chunk_tokens=16)
KEYSPACE = keyspace_id(encode_keyspace(TENANT, SPEC))
OTHER_TENANT = "other"
KEYSPACES = {TENANT: KEYSPACE, OTHER_TENANT: keyspace_id(encode_keyspace(OTHER_TENANT, SPEC))}
"""By tenant. The tenants' chunks have the same hashes, and pages of other bytes."""
TENANT_OF = {keyspace: tenant for tenant, keyspace in KEYSPACES.items()}
SHARDS = 2  # of a chunk that are stored
with small_shards():
    GRID = ShardGrid.of(SPEC)
    _PAYLOAD_BYTES = [payload_bytes(SPEC, GRID, shard) for shard in range(SHARDS)]
PAGE_BYTES = [page_bytes(size) for size in _PAYLOAD_BYTES]
"""By shard: the whole chunk, and the first of its heads."""
LARGEST_BYTES = max(PAGE_BYTES)
SLOT_BYTES = -(-LARGEST_BYTES // 4096) * 4096
SHARED_HEAD = 8
"""Chains of this number and higher begin with the same chunk, as conversations over one system prompt do."""


def chunk_hash(chain: int, position: int) -> bytes:
    if chain >= SHARED_HEAD and not position:
        return b"\xf0\x01" * 8
    return bytes([chain + 1, position + 1]) * 8


def metadata(chain: int, position: int, prompt_tokens: int = 0) -> PageMetadata:
    """The chunk's place in its chain, and the prompt that it was stored for."""
    parent = chunk_hash(chain, position - 1) if position else bytes(16)
    head = chunk_hash(chain, position - position % CHAIN_GROUP_CHUNKS)
    return PageMetadata(parent_hash=parent, chunk_index=position, group_head_hash=head, prompt_tokens=prompt_tokens)


def key_of(chain: int, position: int, shard: int, keyspace: bytes = KEYSPACE) -> PageKey:
    return PageKey(keyspace, chunk_hash(chain, position), shard)


def payload(page: bytes | memoryview) -> bytes:
    """What of a page its writer's engine has computed: all that is there before it is sealed."""
    return bytes(page[64 : 64 + _PAYLOAD_BYTES[PAGE_BYTES.index(len(page))]])


@lru_cache(maxsize=4096)
def true_page(key: PageKey) -> bytes:
    """The sealed page of a key."""
    size = _PAYLOAD_BYTES[key.shard]
    page = bytearray(PAGE_BYTES[key.shard])
    word = key.chunk_hash[:4] + key.keyspace[:2] + key.shard.to_bytes(2, "little")
    page[64 : 64 + size] = word * (size // 8)
    seal(page, key, SPEC.codec, size)
    return bytes(page)
