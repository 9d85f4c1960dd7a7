"""Volumes: what they promise, and the accounting of what is dead in each and which is emptied next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpool.core.page import PageKey

TABLE_RECORD_BYTES = 1024  # of one page: record, member, block and index entry, doubled for compaction
_VOLUME_BYTES = 512 << 20
_VOLUMES_MIN = 32
_VOLUMES_MAX = 256
_DEAD_SHARE = 8  # one part of this many of the live bytes may be dead before volumes are emptied


class PayloadVolumes(Protocol):
    """Where page bytes lie. All raise StoreFault. The caller's lock is held for all but append and read_into."""

    def sizes_bytes(self) -> Mapping[int, int]:
        """Bytes in each volume that was found at start, dead ones included."""
        ...

    def create(self, number: int) -> None:
        """A new, empty volume that survives a power loss."""
        ...

    def reserve(self, number: int, size_bytes: int) -> int:
        """Where the next batch goes in a volume."""
        ...

    def append(self, number: int, position: int, pages: Sequence[tuple[PageKey, memoryview]]) -> Sequence[int]:
        """Write a batch to the place that `reserve` gave; synced on return. The position of each page.

        Several batches may be written at once.
        """
        ...

    def withdraw(self, number: int, position: int, size_bytes: int) -> int:
        """The batch at this place has failed: how many bytes of the volume are free again, for it or others before."""
        ...

    def read_into(self, number: int, position: int, key: PageKey, destination: memoryview) -> bool:
        """Fill `destination` (exactly the page's bytes); False if the volume or the page is not there.

        Raises PageCorrupt if the page is cut off. Its bytes are not verified.
        """
        ...

    def drop(self, number: int) -> None:
        """Remove a volume and its bytes. Reads that have begun may end."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


@dataclass(slots=True)
class Volume:
    """One volume. Bytes are page bytes; a file system counts a little more."""

    number: int
    total_bytes: int = 0
    live_bytes: int = 0  # of pages whose record points here
    writer_count: int = 0  # batches on their way into it
    sealed: bool = False  # takes no new pages

    @property
    def dead_bytes(self) -> int:
        return max(0, self.total_bytes - self.live_bytes)


class Volumes:
    """All volumes of a store, each about `volume_bytes` large."""

    def __init__(self, volume_bytes: int) -> None:
        self.volume_bytes = volume_bytes
        self.last_number = 0  # of any volume there ever was
        self.by_number: dict[int, Volume] = {}
        self._current: Volume | None = None

    def live_bytes(self) -> int:
        """Bytes of all pages that have a record."""
        return sum(volume.live_bytes for volume in self.by_number.values())

    def add(self, volume: Volume) -> None:
        """A volume found at start, or a new one: the last one added that is not sealed takes new pages."""
        self.by_number[volume.number] = volume
        self.last_number = max(self.last_number, volume.number)
        self._current = volume

    def current(self) -> Volume | None:
        """The volume for the next batch; None if a new one must be created."""
        current = self._current
        if current is None or current.sealed or current.total_bytes >= self.volume_bytes:
            return None
        return current

    def victim(self) -> Volume | None:
        """The volume to empty and drop now, sealed by this call; None if little enough is dead.

        A volume without live pages always is one. Otherwise the emptiest goes when more than one volume's worth and
        more than an eighth of the live bytes are dead: that bounds both the space lost and the bytes moved.
        """
        idle = [volume for volume in self.by_number.values() if not volume.writer_count and volume.dead_bytes]
        if not idle:
            return None
        victim = min(idle, key=lambda volume: volume.live_bytes / volume.total_bytes)
        dead_bytes = sum(volume.dead_bytes for volume in self.by_number.values())
        if victim.live_bytes and dead_bytes <= max(self.volume_bytes, self.live_bytes() // _DEAD_SHARE):
            return None
        victim.sealed = True
        return victim

    def remove(self, volume: Volume) -> None:
        """The volume was dropped."""
        del self.by_number[volume.number]
        if self._current is volume:
            self._current = None


def default_volume_bytes(capacity_bytes: int) -> int:
    """A small disk tier is cut into smaller volumes, so that little of it is lost to their slack; a large one into
    larger ones: each is a column family."""
    return max(1, capacity_bytes // _VOLUMES_MAX, min(_VOLUME_BYTES, capacity_bytes // _VOLUMES_MIN))


def live_limit_bytes(capacity_bytes: int, volume_bytes: int) -> int:
    """Page bytes that may be live so that the files stay within a capacity: beside them lie dead pages, the copy of a
    volume being emptied (half as large again as it should be), what writers at once have replaced but not yet given
    back (together no more than a volume, if their batches are that small), records, logs and the manifest.
    """
    fixed_bytes = 3 * volume_bytes + (24 << 20)
    return max(0, (capacity_bytes - fixed_bytes) * _DEAD_SHARE // (_DEAD_SHARE + 1))
