"""Pages that lightllm's other processes fill, until they say so or the kernel says that they are gone.

A process whose connection broke may still have its kernels writing, so its pages are not given to anybody else as long
as it lives.
"""

from __future__ import annotations

import os
import select
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence


class Peer:
    """One process, for all of its connections."""

    def __init__(self, pidfd: int) -> None:
        self.pidfd = pidfd
        self.held: Counter[int] = Counter()
        self.gone = False


class Peers:
    """Thread-safe."""

    def __init__(self, give_back: Callable[[Sequence[int]], None]) -> None:
        """give_back: called with the pages of a process that is gone, from a thread of this class."""
        self._give_back = give_back
        self._lock = threading.Lock()
        self._peers: dict[int, Peer] = {}
        self._by_pidfd: dict[int, int] = {}
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="kvpool-lightllm-peers", daemon=True)
        self._thread.start()

    def connected(self, pid: int) -> Peer | None:
        """The process; None for one that is gone already, and after `close`."""
        with self._lock:
            known = self._peers.get(pid)
            if known is not None and not _has_ended(known.pidfd):
                return known
        if known is not None:  # its number belongs to another process by now
            self._end(pid)
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        with self._lock:
            peer = self._peers.get(pid)
            if peer is not None or self._closed:
                os.close(pidfd)  # another of its connections was quicker
                return peer
            peer = self._peers[pid] = Peer(pidfd)
            self._by_pidfd[pidfd] = pid
            self._epoll.register(pidfd, select.EPOLLIN)
            return peer

    def hold(self, peer: Peer, pages: Iterable[int]) -> bool:
        """The process fills these pages now; False if it is gone, and they have to be given back."""
        with self._lock:
            if not peer.gone:
                peer.held.update(pages)
            return not peer.gone

    def let_go(self, peer: Peer, pages: Iterable[int]) -> None:
        """It fills them no more; those that it did not hold are passed over."""
        with self._lock:
            for page in pages:
                if peer.held[page] > 1:
                    peer.held[page] -= 1
                else:
                    del peer.held[page]

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join()

    def _watch(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._wake:
                    self._close()
                    return
                with self._lock:
                    pid = self._by_pidfd.get(descriptor)
                if pid is not None:
                    self._end(pid)

    def _end(self, pid: int) -> None:
        with self._lock:
            peer = self._peers.get(pid)
            if peer is None or not _has_ended(peer.pidfd):
                return  # somebody else has ended it
            del self._peers[pid], self._by_pidfd[peer.pidfd]
            self._epoll.unregister(peer.pidfd)
            os.close(peer.pidfd)
            peer.gone = True
            held = list(peer.held.elements())
            peer.held.clear()
        self._give_back(held)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            for peer in self._peers.values():
                os.close(peer.pidfd)
            self._peers.clear()
            self._by_pidfd.clear()
        self._epoll.close()
        os.close(self._wake)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
