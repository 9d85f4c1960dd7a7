"""Changes of what this node holds, gathered until they are announced."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.cluster import LocationChange
from kvpool.core.outcome import Tier
from kvpool.core.page import PageKey


@dataclass(slots=True)
class _Pending:
    """The last word on each shard of one chunk and tier: a bit is in at most one of the masks."""

    group_head_hash: bytes
    added: int = 0
    removed: int = 0


class LocationBuffer:
    """Merges changes of one chunk, the last word on each shard wins; chunks keep the order of their first change."""

    def __init__(self) -> None:
        self._pending: dict[tuple[bytes, bytes, Tier], _Pending] = {}

    def __bool__(self) -> bool:
        return bool(self._pending)

    def note(self, key: PageKey, group_head_hash: bytes, tier: Tier, present: bool) -> None:
        """A page came to a tier or left it."""
        self.note_shards(key.keyspace, key.chunk_hash, group_head_hash, tier, 1 << key.shard, present)

    def note_shards(
        self, keyspace: bytes, chunk_hash: bytes, group_head_hash: bytes, tier: Tier, shards: int, present: bool
    ) -> None:
        """Shards (a bitmap) of one chunk came to a tier or left it."""
        at = (keyspace, chunk_hash, tier)
        pending = self._pending.get(at)
        if pending is None:
            pending = self._pending[at] = _Pending(group_head_hash)
        if present:
            pending.added |= shards
            pending.removed &= ~shards
        else:
            pending.removed |= shards
            pending.added &= ~shards

    def forget_keyspace(self, keyspace: bytes) -> None:
        """The keyspace is dropped as a whole: what was pending of it is void."""
        self._pending = {at: value for at, value in self._pending.items() if at[0] != keyspace}

    def take(self) -> list[LocationChange]:
        """What to announce now; the buffer is empty afterwards."""
        changes = [
            LocationChange(
                keyspace=keyspace,
                chunk_hash=chunk_hash,
                group_head_hash=pending.group_head_hash,
                tier=tier,
                added_shards=pending.added,
                removed_shards=pending.removed,
            )
            for (keyspace, chunk_hash, tier), pending in self._pending.items()
        ]
        self._pending.clear()
        return changes
