"""Which pages of a size class are given up, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping

from kvpool_pagestore.core.eviction import EvictionPolicy
from kvpool_pagestore.core.slots import Slot


def walk(
    pages: EvictionPolicy[bytes],
    slots: Mapping[bytes, Slot],
    keyspaces: Collection[bytes],
    spare: Callable[[Slot], bool],
    now_us: int,
) -> Generator[Slot]:
    """Pages of these keyspaces in the order of the policy, none that is spared. Free each, then ask for the next.

    A page that is spared is asked about once: it is held until the walk ends, so that the policy does not come by it
    again for each victim. Close the walk when it has brought enough.
    """
    passed: list[Slot] = []
    new: list[Slot] = []

    def spared(name: bytes) -> bool:
        if not spare(slots[name]):
            return False
        new.append(slots[name])
        return True

    try:
        while (name := pages.evict(now_us, domains=keyspaces, spare=spared)) is not None:
            for slot in new:
                pages.hold(slot.name)
            passed += new
            new.clear()
            yield slots[name]
        # Every other end of a chain is in use or spared: gaps in chains are better than no room for anybody.
        for slot in [one for one in slots.values() if one.page.key.keyspace in keyspaces]:
            if slot.idle and slot.page.metadata.pinned_until_us <= now_us and not spare(slot):
                yield slot
    finally:
        for slot in passed:
            if slot.idle:
                pages.release(slot.name)
