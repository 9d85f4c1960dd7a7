"""Who is calling: the tenant comes from here, and never from a request field."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool.core.errors import Unauthenticated
from kvpool_server.interceptors.wrapping import AioInterceptor, Call, Metadata, SyncInterceptor

# Probes of an orchestrator carry no credentials.
_OPEN_SERVICES: Final = frozenset({"grpc.health.v1.Health"})


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated caller."""

    tenant: str


class Authenticator(Protocol):
    """Identifies the sender of a request. Called on the event loop for every call, so it must not block."""

    def authenticate(self, metadata: Metadata) -> Identity | None:
        """The caller, or None when the metadata proves no caller. May raise Unauthenticated with a better message."""


class DefaultTenantAuthenticator:
    """Takes every caller for the one configured tenant: for clusters without authentication."""

    def __init__(self, tenant: str) -> None:
        self._identity = Identity(tenant)

    def authenticate(self, metadata: Metadata) -> Identity | None:
        return self._identity


_identity: ContextVar[Identity | None] = ContextVar("kvpool_identity", default=None)


def current_identity() -> Identity:
    """The caller of the request that is being handled. Raises Unauthenticated outside of one.

    Follows into tasks and `asyncio.to_thread` calls that the handler starts, not into other threads.
    """
    identity = _identity.get()
    if identity is None:
        raise Unauthenticated("current_identity() was called outside of an authenticated request")
    return identity


class AioAuth(AioInterceptor):
    """Sets the identity for the call's task."""

    def __init__(self, authenticator: Authenticator) -> None:
        super().__init__()
        self._authenticator = authenticator

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        _identity.set(_authenticate(self._authenticator, call))
        yield  # not reset: each call has a task, and so a context, of its own


class SyncAuth(SyncInterceptor):
    """Sets the identity for the pool's thread while it handles the call."""

    def __init__(self, authenticator: Authenticator) -> None:
        super().__init__()
        self._authenticator = authenticator

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        _identity.set(_authenticate(self._authenticator, call))
        try:
            yield
        finally:
            _identity.set(None)  # the next call on this thread must not inherit it


def _authenticate(authenticator: Authenticator, call: Call) -> Identity | None:
    if call.service in _OPEN_SERVICES:
        return None
    identity = authenticator.authenticate(call.metadata())
    if identity is None:
        raise Unauthenticated("the request's credentials prove no known caller")
    return identity
