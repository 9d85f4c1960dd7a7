"""What a cache asks of its eviction policy, whichever it is. Pure: no clock, no I/O, no randomness."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

EXPIRED_PRIORITY = -128
"""Below every priority that may be asked for (-100 to 100): what has expired goes before anything else."""


@dataclass(frozen=True, slots=True)
class Retention:
    """What was asked for a key beside its use. Times are wall time in microseconds since the epoch."""

    priority: int = 0  # -100 (first to go) to 100 (last to go)
    pinned_until_us: int = 0  # never a victim before; 0: not pinned
    expires_us: int = 0  # worthless from then on; 0: never


PLAIN = Retention()


class EvictionPolicy(Protocol[K]):
    """Which key a full cache gives up next. It holds keys only; bytes and budgets are its user's.

    Common to all policies:
    - A key that is held (being read or written) or pinned is never a victim; if nothing else is left there is none.
    - What has expired goes first, then lower priorities before higher ones; within a priority the policy decides.
    - Memory is bounded by the keys inside: whatever is remembered of keys that left is a constant share of that.

    Methods that name a key are ignored if it is not inside, except `insert`.
    """

    def __len__(self) -> int:
        """Keys inside."""
        ...

    def __contains__(self, key: K) -> bool: ...

    def insert(self, key: K, parent: K | None = None, *, domain: Hashable = None, retention: Retention = PLAIN) -> None:
        """A key came in; it counts as used now. Again for a key that is inside: touched and retained as said here.

        parent: the key before it in its chain, inside or not; None for the first of a chain. It never changes.
        domain: a label by which `evict` can be held to a part of the keys, such as the keyspace.
        """
        ...

    def restore(
        self, key: K, parent: K | None = None, *, domain: Hashable = None, retention: Retention = PLAIN
    ) -> None:
        """`insert` of a key that was inside before a restart: nothing is learned from the order in which such come.

        For many keys, in any order; cheaper than `insert`.
        """
        ...

    def touch(self, key: K) -> None:
        """It was used. Touch the keys of a chain from its head on."""
        ...

    def hold(self, key: K) -> None:
        """No victim until `release`. Not counted: one release ends any number of holds."""
        ...

    def release(self, key: K) -> None:
        """It may be a victim again."""
        ...

    def retain(self, key: K, retention: Retention) -> None:
        """Another retention from now on."""
        ...

    def remove(self, key: K) -> None:
        """It is gone for a reason of the user's own; nothing of it is remembered."""
        ...

    def evict(
        self, now_us: int = 0, *, domains: Collection[Hashable] | None = None, spare: Callable[[K], bool] | None = None
    ) -> K | None:
        """Take out the next victim. None if nothing may go.

        domains: only keys of these, if not None. spare: keys for which it is true are passed over this time.
        """
        ...
