"""Keyspaces that this node has pages of: whose they are, and how large a page is."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Final
from weakref import WeakValueDictionary

from kvpool.core.errors import InvalidRequest, QuotaExceeded, TenantDenied
from kvpool.core.grid import ShardGrid, shards_in
from kvpool.core.keyspace import KeyspaceSpec, decode_keyspace, encode_keyspace, keyspace_id
from kvpool.core.page import PageKey, page_bytes
from kvpool.core.payload import payload_bytes
from kvpool_pagestore.core.admission import AdmissionRequest
from kvpool_pagestore.core.events import BytesHeld

USED_LAST_MAX: Final = 1024  # keyspaces that stay known without pages here, and without a session or transfer


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
    """The keyspaces that this node knows, by id. Changed on one thread; `find` may be called on any.

    A keyspace is known while pages of it are here, and while anyone holds the object: a session that named it, a
    transfer. Of all others only those that were used last stay, since any caller may name keyspaces without end.
    """

    def __init__(self, max_keyspaces: int = 4096) -> None:
        """max_keyspaces: of a tenant, with pages here at once."""
        self._max_keyspaces = max_keyspaces
        self._by_id: WeakValueDictionary[bytes, Keyspace] = WeakValueDictionary()
        self._with_pages: dict[bytes, Keyspace] = {}
        self._held_bytes: dict[bytes, int] = {}  # of those
        self._tenants: Counter[str] = Counter()  # of those
        self._used_last: dict[bytes, Keyspace] = {}  # without pages, the oldest use first

    def admit(self, tenant: str, claimed_id: bytes, spec: KeyspaceSpec) -> Keyspace:
        """The caller's keyspace, known from now on.

        Raises TenantDenied unless the id is the one that this tenant's keyspace of that spec has.
        """
        found = Keyspace(tenant, spec, encode_keyspace(tenant, spec))
        if found.keyspace != claimed_id:
            raise TenantDenied(f"keyspace {claimed_id.hex()} is not the caller's keyspace of that specification")
        return self._know(found)

    def remember(self, encoding: bytes) -> Keyspace:
        """A keyspace that the disk tier kept. Raises InvalidRequest for a malformed encoding."""
        tenant, spec = decode_keyspace(encoding)
        return self._know(Keyspace(tenant, spec, encoding))

    def find(self, keyspace: bytes) -> Keyspace | None:
        return self._with_pages.get(keyspace) or self._by_id.get(keyspace)

    def of_tenant(self, tenant: str) -> list[Keyspace]:
        return [one for one in self.all() if one.tenant == tenant]

    def all(self) -> list[Keyspace]:
        return list(self._by_id.values())

    def count(self, held: BytesHeld) -> None:
        """Bytes of a keyspace were taken, or came back."""
        keyspace, size_bytes = held
        held_bytes = self._held_bytes.get(keyspace, 0) + size_bytes
        if held_bytes:
            self._held_bytes[keyspace] = held_bytes
            if keyspace not in self._with_pages:
                self._with_pages[keyspace] = self._by_id[keyspace]
                self._tenants[self._by_id[keyspace].tenant] += 1
                self._used_last.pop(keyspace, None)
        elif keyspace in self._with_pages:
            del self._held_bytes[keyspace]
            emptied = self._with_pages.pop(keyspace)
            self._tenants[emptied.tenant] -= 1
            if not self._tenants[emptied.tenant]:
                del self._tenants[emptied.tenant]
            self._use(emptied)

    def refusal(self, request: AdmissionRequest) -> QuotaExceeded | None:
        """An AdmissionRule: no pages of a further keyspace when its tenant has as many as it may."""
        asked = self.find(request.record.key.keyspace)
        if asked is None or asked.keyspace in self._with_pages or self._tenants[asked.tenant] < self._max_keyspaces:
            return None
        return QuotaExceeded(
            f"the tenant has pages of {self._max_keyspaces} keyspaces here, as many as max_keyspaces allows"
        )

    # Inside

    def _know(self, keyspace: Keyspace) -> Keyspace:
        known = self._by_id.setdefault(keyspace.keyspace, keyspace)
        if known.keyspace not in self._with_pages:
            self._use(known)
        return known

    def _use(self, keyspace: Keyspace) -> None:
        self._used_last.pop(keyspace.keyspace, None)
        self._used_last[keyspace.keyspace] = keyspace
        if len(self._used_last) > USED_LAST_MAX:
            del self._used_last[next(iter(self._used_last))]


def check_page(keyspace: Keyspace, key: PageKey, size_bytes: int) -> None:
    """Raises InvalidRequest unless a page of that key has exactly that size."""
    exact_bytes = keyspace.page_bytes(key.shard)
    if size_bytes != exact_bytes:
        raise InvalidRequest(f"page {key} has {exact_bytes} bytes in its keyspace, got page_bytes {size_bytes}")


def chunk_pages(keyspace: bytes, chunk_hash: bytes, shards: int) -> list[PageKey]:
    """Return the pages of a chunk that a bitmap of shards names, in the order of their shards."""
    return [PageKey(keyspace, chunk_hash, shard) for shard in shards_in(shards)]
