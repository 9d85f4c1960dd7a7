"""Keyspaces that this node has pages of: whose they are, and how large a page is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvpool.core.errors import InvalidRequest, TenantDenied
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec, decode_keyspace, encode_keyspace, keyspace_id
from kvpool.core.page import PageKey, page_bytes
from kvpool.core.payload import payload_bytes


@dataclass(frozen=True)
class Keyspace:
    """A keyspace and its owner. encoding: canonical, what the id is a hash of."""

    tenant: str
    spec: KeyspaceSpec
    encoding: bytes

    @cached_property
    def keyspace(self) -> bytes:
        """The 16-byte id."""
        return keyspace_id(self.encoding)

    @cached_property
    def grid(self) -> ShardGrid:
        return ShardGrid.of(self.spec)

    @cached_property
    def all_shards(self) -> int:
        """Bitmap of the grid's coarsest split: a whole chunk in the fewest pages."""
        return self.grid.all_shards

    def payload_bytes(self, shard: int) -> int:
        """Exact payload of a shard's pages. Raises InvalidRequest for a shard outside of the grid."""
        return payload_bytes(self.spec, self.grid, shard)

    def page_bytes(self, shard: int) -> int:
        """Exact bytes of a shard's pages: header and payload."""
        known = self._page_bytes.get(shard)
        if known is None:
            known = self._page_bytes[shard] = page_bytes(self.payload_bytes(shard))
        return known

    @cached_property
    def _page_bytes(self) -> dict[int, int]:
        """By shard: asked for with each page of a million, at a start."""
        return {}


class KeyspaceBook:
    """All keyspaces known to this node, by id."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Keyspace] = {}

    def admit(self, tenant: str, claimed_id: bytes, spec: KeyspaceSpec) -> Keyspace:
        """The caller's keyspace, known from now on.

        Raises TenantDenied unless the id is the one that this tenant's keyspace of that spec has.
        """
        found = Keyspace(tenant, spec, encode_keyspace(tenant, spec))
        if found.keyspace != claimed_id:
            raise TenantDenied(f"keyspace {claimed_id.hex()} is not the caller's keyspace of that specification")
        return self._by_id.setdefault(claimed_id, found)

    def remember(self, encoding: bytes) -> Keyspace:
        """A keyspace that the disk tier kept. Raises InvalidRequest for a malformed encoding."""
        tenant, spec = decode_keyspace(encoding)
        found = Keyspace(tenant, spec, encoding)
        return self._by_id.setdefault(found.keyspace, found)

    def find(self, keyspace: bytes) -> Keyspace | None:
        return self._by_id.get(keyspace)

    def of_tenant(self, tenant: str) -> list[Keyspace]:
        return [one for one in self._by_id.values() if one.tenant == tenant]

    def all(self) -> list[Keyspace]:
        return list(self._by_id.values())


def check_page(keyspace: Keyspace, key: PageKey, size_bytes: int) -> None:
    """Raises InvalidRequest unless a page of that key has exactly that size."""
    exact_bytes = keyspace.page_bytes(key.shard)
    if size_bytes != exact_bytes:
        raise InvalidRequest(f"page {key} has {exact_bytes} bytes in its keyspace, got page_bytes {size_bytes}")


def chunk_pages(keyspace: bytes, chunk_hash: bytes, shards: int) -> list[PageKey]:
    """Return the pages of a chunk that a bitmap of shards names, in the order of their shards."""
    return [PageKey(keyspace, chunk_hash, shard) for shard in shards_in(shards)]
