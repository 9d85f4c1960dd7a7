"""The slots of one tenant and size: which of the pages in them goes first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator

from kvpool.core.page import KEY_BYTES
from kvpool_pagestore.core.eviction import EvictionPolicy
from kvpool_pagestore.core.key_rows import PackedRows
from kvpool_pagestore.core.slots import Segment, Slot


class SlotRows(PackedRows):
    """Rows of page names, each with the page's slot; the policy lets go of none that has one."""

    def __init__(self) -> None:
        super().__init__(KEY_BYTES)
        self.slots: list[Slot | None] = []  # None: a page that is not here, but others of its chain are

    def add(self, key: bytes) -> int:
        row = super().add(key)
        if row == len(self.slots):
            self.slots.append(None)
        return row

    def remove(self, row: int) -> None:
        if self.slots[row] is None:
            super().remove(row)

    def slot(self, row: int) -> Slot:
        """Return the slot of a page that is here."""
        slot = self.slots[row]
        assert slot is not None
        return slot


class SizeClass:
    """The slots of one tenant and size. `pages` ranks the visible pages in them, by the names that `rows` has."""

    def __init__(self) -> None:
        self.rows = SlotRows()
        self.pages: EvictionPolicy[bytes] = EvictionPolicy(self.rows)  # a copy: a page that is on disk too
        self.open: dict[int, Segment] = {}  # segments with a free slot, by id
        self.idle: dict[int, Segment] = {}  # segments with an evictable slot, by id
        self.pinned_until_us = 0  # all evictable slots are pinned until then, as of the last look; 0: not known

    def victims(
        self, keyspaces: Collection[bytes], spare: Callable[[Slot], bool], now_us: int, *, only_copies: bool
    ) -> Generator[Slot]:
        """Pages of these keyspaces in the order of the policy, none that is spared. Free each, then ask for the next.

        A page that is spared is asked about once: it is held until the walk ends, so that the policy does not come by
        it again for each victim. Close the walk when it has brought enough.
        """
        passed: list[Slot] = []
        new: list[Slot] = []

        def spared(name: bytes) -> bool:
            slot = self.rows.slot(self.rows.find(name))
            if not spare(slot):
                return False
            new.append(slot)
            return True

        def next_name() -> bytes | None:
            return self.pages.evict(now_us, domains=keyspaces, only_copies=only_copies, spare=spared)

        try:
            while (name := next_name()) is not None:
                for slot in new:
                    self.pages.hold_row(slot.row)
                passed += new
                new.clear()
                yield self.rows.slot(self.rows.find(name))
            # Every other end of a chain is in use or spared: gaps in chains are better than no room at all.
            for row in self.pages.gaps(keyspaces, only_copies=only_copies):
                if not spare(slot := self.rows.slot(row)):
                    yield slot
        finally:
            for slot in passed:
                if slot.idle:
                    self.pages.release_row(slot.row)
