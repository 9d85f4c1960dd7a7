"""What policies share that know nothing of chains: a queue for each priority and domain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Generic, Protocol

from kvpool.core.eviction.port import PLAIN, K, Retention
from kvpool.core.eviction.retention import RetentionBook


class Queue(Protocol[K]):
    """The order of the keys of one priority and domain that may go."""

    def add(self, key: K, at: int) -> None:
        """A key that is not in it; `at` counts uses of the whole cache."""
        ...

    def put_back(self, key: K, at: int) -> None:
        """A key that was just taken and is spared: it is the next one again."""
        ...

    def touch(self, key: K, at: int) -> None:
        """A key in it was used."""
        ...

    def discard(self, key: K) -> int:
        """Take a key out, without a trace; when it came or was used, as `put_back` wants it."""
        ...

    def oldest(self) -> int | None:
        """The `at` of the next victim, about; None if there is none."""
        ...

    def take(self) -> tuple[K, int]:
        """Take the next victim out; the key and its `at`."""
        ...

    def gone(self, key: K) -> None:
        """The key that was taken is not put back."""
        ...


class QueuedPolicy(Generic[K]):
    """EvictionPolicy out of queues. Among the queues of a priority the one with the oldest victim gives it."""

    def __init__(self, make_queue: Callable[[], Queue[K]]) -> None:
        self._make_queue = make_queue
        self._queues: dict[tuple[int, Hashable], Queue[K]] = {}
        self._queue_of: dict[K, Queue[K] | None] = {}  # None: held or pinned
        self._domain_of: dict[K, Hashable] = {}  # those with one
        self._held: set[K] = set()
        self._book: RetentionBook[K] = RetentionBook()
        self._uses = 0

    def __len__(self) -> int:
        return len(self._queue_of)

    def __contains__(self, key: K) -> bool:
        return key in self._queue_of

    def insert(self, key: K, parent: K | None = None, *, domain: Hashable = None, retention: Retention = PLAIN) -> None:
        if key in self._queue_of:
            self.touch(key)
            self.retain(key, retention)
            return
        if domain is not None:
            self._domain_of[key] = domain
        if retention is not PLAIN:
            self._book.note(key, retention)
        self._uses += 1
        self._place(key)

    def restore(
        self, key: K, parent: K | None = None, *, domain: Hashable = None, retention: Retention = PLAIN
    ) -> None:
        self.insert(key, parent, domain=domain, retention=retention)

    def touch(self, key: K) -> None:
        self._uses += 1
        queue = self._queue_of.get(key)
        if queue is not None:
            queue.touch(key, self._uses)

    def hold(self, key: K) -> None:
        if key in self._queue_of and key not in self._held:
            self._held.add(key)
            self._take_out(key)

    def release(self, key: K) -> None:
        if key in self._held:
            self._held.discard(key)
            self._place(key)

    def retain(self, key: K, retention: Retention) -> None:
        if key in self._queue_of and (retention != PLAIN or len(self._book)):
            self._take_out(key)
            self._book.note(key, retention)
            self._place(key)

    def remove(self, key: K) -> None:
        if key in self._queue_of:
            self._take_out(key)
            self._drop(key)

    def evict(
        self, now_us: int = 0, *, domains: Collection[Hashable] | None = None, spare: Callable[[K], bool] | None = None
    ) -> K | None:
        for key in self._book.advance(now_us):
            self._take_out(key)
            self._place(key)
        spared: list[tuple[Queue[K], K, int]] = []
        found: K | None = None
        for queue in self._next_queues(domains):
            key, at = queue.take()
            if spare is None or not spare(key):
                queue.gone(key)
                found = key
                break
            spared.append((queue, key, at))
        for queue, key, at in reversed(spared):
            queue.put_back(key, at)
        if found is not None:
            self._drop(found)
        return found

    # Inside

    def _next_queues(self, domains: Collection[Hashable] | None) -> Iterator[Queue[K]]:
        """The queue to take from, again and again, while any has a victim."""
        for priority in sorted({priority for priority, _ in self._queues}):
            queues = [
                queue
                for (its_priority, its_domain), queue in self._queues.items()
                if its_priority == priority and (domains is None or its_domain in domains)
            ]
            while True:
                ages = [
                    (oldest, number) for number, queue in enumerate(queues) if (oldest := queue.oldest()) is not None
                ]
                if not ages:
                    break
                yield queues[min(ages)[1]]

    def _place(self, key: K) -> None:
        if key in self._held or self._book.pinned(key):
            self._queue_of[key] = None
            return
        at = (self._book.priority(key) if len(self._book) else 0, self._domain_of.get(key))
        queue = self._queues.get(at)
        if queue is None:
            queue = self._queues[at] = self._make_queue()
        self._queue_of[key] = queue
        queue.add(key, self._uses)

    def _take_out(self, key: K) -> None:
        queue = self._queue_of[key]
        if queue is not None:
            queue.discard(key)
            self._queue_of[key] = None

    def _drop(self, key: K) -> None:
        del self._queue_of[key]
        self._domain_of.pop(key, None)
        self._held.discard(key)
        self._book.forget(key)
