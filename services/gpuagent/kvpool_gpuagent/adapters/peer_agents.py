"""Other agents of this host, by way of the client library."""

from __future__ import annotations

import asyncio
import os
import stat

from kvpool.client.cache_loan import CacheLoan
from kvpool.client.config import ClientConfig
from kvpool.core.addresses import check_socket_path
from kvpool.core.errors import InvalidRequest, ServiceUnavailable
from kvpool_gpuagent.ports import MappedHandle


class LentCache:
    """See borrowing.CacheLoan."""

    def __init__(self, loan: CacheLoan) -> None:
        self._loan = loan
        self.layout = loan.layout
        self.handles = tuple(MappedHandle(size_bytes=each.size_bytes, ipc=each.memory) for each in loan.regions)

    @property
    def ended(self) -> asyncio.Event:
        """See borrowing.CacheLoan."""
        return self._loan.ended

    async def check(self, timeout_s: float) -> None:
        """See borrowing.CacheLoan."""
        await self._loan.check(timeout_s)

    async def close(self) -> None:
        """See borrowing.CacheLoan."""
        await self._loan.close()


class GrpcPeerAgents:
    """See borrowing.PeerAgents. Each loan has a connection of its own, so that its end is the end of the other side."""

    def __init__(self, config: ClientConfig) -> None:
        self._config = config

    async def borrow(self, endpoint: str, session_id: bytes, keyspace: bytes, timeout_s: float) -> LentCache:
        """See borrowing.PeerAgents. Raises InvalidRequest for a path that is not a socket of an agent like this one."""
        await asyncio.to_thread(_check_socket, endpoint.removeprefix("unix:"))
        return LentCache(await CacheLoan.open(endpoint, session_id, keyspace, self._config, timeout_s=timeout_s))


def _check_socket(path: str) -> None:
    """A peer names the path: this process must not be led to the sockets of others, such as a container runtime's."""
    check_socket_path(path, "source_agent")
    try:
        is_own = os.path.realpath(path) == path and _is_own_socket(os.lstat(path))
    except FileNotFoundError:  # its agent may be starting again
        raise ServiceUnavailable(f"failed to connect to source_agent {path!r}: it does not exist") from None
    except OSError as error:
        raise InvalidRequest(f"source_agent {path!r} cannot be used: {error.strerror}") from None
    if not is_own:
        raise InvalidRequest(
            f"source_agent must be the path of a socket of uid {os.geteuid()}, without symbolic links and '..', "
            f"got {path!r}"
        )


def _is_own_socket(found: os.stat_result) -> bool:
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()
