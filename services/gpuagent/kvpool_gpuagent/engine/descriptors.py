"""Engine memory that arrives as descriptors on the raw unix socket, matched to sessions by one-session tokens."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import secrets
from collections.abc import Sequence

from kvpool.core.errors import InvalidRequest
from kvpool.core.ipc import GENERATION_BYTES, HOLD_ENDED
from kvpool_server.fds import PeerCredentials


class FdInbox:
    """Collects the descriptors of one session. Whatever is not taken is closed."""

    def __init__(self, sizes_bytes: Sequence[int]) -> None:
        self.token = secrets.token_bytes(32)
        self.process = ""  # that has offered descriptors, as the kernel says
        self._sizes_bytes = tuple(sizes_bytes)
        self._descriptors: dict[int, int] = {}
        self._complete = asyncio.Event()
        if not self._sizes_bytes:
            self._complete.set()

    def offer(self, peer: PeerCredentials, handle: int, size_bytes: int, descriptor: int) -> None:
        """Take a descriptor over. Raises InvalidRequest (and leaves it to the caller) for one that was not asked
        for."""
        if handle >= len(self._sizes_bytes) or handle in self._descriptors:
            raise InvalidRequest(f"handle {handle} is not awaited; {len(self._sizes_bytes)} were registered")
        if size_bytes != self._sizes_bytes[handle]:
            raise InvalidRequest(
                f"handle {handle} was registered with {self._sizes_bytes[handle]} bytes, offered with {size_bytes}"
            )
        self._descriptors[handle] = descriptor
        self.process = f"process {peer.pid}" if peer.pid else f"user {peer.uid}"
        if len(self._descriptors) == len(self._sizes_bytes):
            self._complete.set()

    async def wait(self, timeout_s: float) -> None:
        """Return when all descriptors have come. Raises InvalidRequest if they do not come in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._complete.wait()
        except TimeoutError:
            missing = sorted(set(range(len(self._sizes_bytes))) - set(self._descriptors))
            raise InvalidRequest(f"descriptors of handles {missing} were not offered within {timeout_s:g} s") from None

    def take(self) -> list[int]:
        """Return all descriptors, which have come, in handle order; the caller owns them."""
        taken, self._descriptors = self._descriptors, {}
        return [taken[handle] for handle in range(len(self._sizes_bytes))]

    def close(self) -> None:
        """Close what was not taken."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}


class FdExchange:
    """Finds the inbox of a token; its `on_offer` serves kvpool_server.fds.FdServer."""

    def __init__(self) -> None:
        self._inboxes: dict[bytes, FdInbox] = {}

    def open(self, sizes_bytes: Sequence[int]) -> FdInbox:
        """A new inbox; close it with `drop`."""
        inbox = FdInbox(sizes_bytes)
        self._inboxes[inbox.token] = inbox
        return inbox

    def drop(self, inbox: FdInbox) -> None:
        """Forget an inbox and close what is left in it."""
        self._inboxes.pop(inbox.token, None)
        inbox.close()

    def on_offer(self, peer: PeerCredentials, token: bytes, handle: int, size_bytes: int, descriptor: int) -> None:
        """See kvpool_server.fds.OfferHandler. The token is 256 random bits: a plain look-up leaks nothing useful."""
        inbox = self._inboxes.get(token)
        if inbox is None:
            raise InvalidRequest("no session waits for descriptors under this token")
        inbox.offer(peer, handle, size_bytes, descriptor)


_log = logging.getLogger(__name__)


def map_generations(descriptor: int, block_count: int) -> mmap.mmap:
    """Map an engine's table of block generations for reading; owns the descriptor. Raises InvalidRequest for a file
    that is too short, or that could become so under the mapping."""
    size_bytes = block_count * GENERATION_BYTES
    try:
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise InvalidRequest("the file of block generations must be sealed against shrinking (F_SEAL_SHRINK)")
        if os.fstat(descriptor).st_size < size_bytes:
            raise InvalidRequest(f"the file of block generations must have {size_bytes} bytes")
        return mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError as error:
        raise InvalidRequest(f"the file of block generations cannot be mapped ({error.strerror})") from error
    finally:
        os.close(descriptor)


class HoldFile:
    """An engine's open file, kept open as long as its memory is mapped; see the proto's EngineRegister.hold_file.

    The engine has locked it: the kernel drops the lock when this process ends, so that it need not trust us.
    """

    def __init__(self, descriptor: int) -> None:
        """Owns the descriptor."""
        self._descriptor = descriptor

    async def release(self) -> None:
        """Nothing of this process touches the engine's memory any more. Idempotent, never raises."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            await asyncio.to_thread(_end, descriptor)  # whatever kind of file a peer has made it


def _end(descriptor: int) -> None:
    try:
        os.pwrite(descriptor, HOLD_ENDED, 0)
    except OSError as error:
        _log.warning("an engine's hold file cannot be written: %s", error)
    finally:
        os.close(descriptor)
