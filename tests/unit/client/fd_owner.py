"""An owner of descriptors behind a real FdServer, and a check that nothing stays open."""

import hmac
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from kvpool.core.errors import SessionUnknown
from kvpool.testing import eventually
from kvpool_server.fds import FdGrant, FdServer, PeerCredentials
from tests.fixtures.patience import PATIENCE_S

TOKEN = bytes(range(32))


def open_fds() -> set[str]:
    """What this process has open, by number and target."""
    targets = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            targets.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue  # the listing's own
    return targets


class Owner:
    """Owns one memfd that it hands out, and takes what is offered."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("segment")
        os.write(self.fd, b"arena bytes")
        self.close_after = False
        self.offers: list[tuple[int, int, int]] = []  # id, size, descriptor
        self.peers: list[PeerCredentials] = []

    def fetch(self, peer: PeerCredentials, token: bytes, number: int) -> FdGrant:
        self._check(peer, token)
        if number == 666:
            raise KeyError("a bug with a secret")
        return FdGrant(self.fd, size_bytes=11, close_after=self.close_after)

    def offer(self, peer: PeerCredentials, token: bytes, number: int, size_bytes: int, fd: int) -> None:
        self._check(peer, token)
        self.offers.append((number, size_bytes, fd))

    def _check(self, peer: PeerCredentials, token: bytes) -> None:
        if not hmac.compare_digest(token, TOKEN):
            raise SessionUnknown("no session has this token")
        self.peers.append(peer)


@asynccontextmanager
async def serving(
    tmp_path: Path, connection_limit: int = 64, timeout_s: float = PATIENCE_S
) -> AsyncIterator[tuple[Owner, FdServer, Path]]:
    """A server on a fresh socket; asserts that no descriptor is left over in the end."""
    before = open_fds()
    owner, path = Owner(), tmp_path / "fds.sock"
    server = FdServer(
        path,
        on_fetch=owner.fetch,
        on_offer=owner.offer,
        connection_limit=connection_limit,
        timeout_s=timeout_s,
    )
    server.start()
    try:
        yield owner, server, path
    finally:
        await eventually(lambda: server.connection_count == 0)
        server.close()
        for _, _, fd in owner.offers:
            os.close(fd)
        if not owner.close_after:
            os.close(owner.fd)
    # The default executor keeps its threads, and they have no descriptors.
    # Sockets that earlier tests of this process left to gRPC may close meanwhile, so fewer is fine.
    assert open_fds() <= before
    assert not path.exists()
