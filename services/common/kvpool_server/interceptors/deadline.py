"""No unary call without a deadline: the client's own up to a limit, or the server's cap."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from kvpool.core.errors import DeadlineExceeded
from kvpool_server.interceptors.wrapping import AioInterceptor, Call, SyncInterceptor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePolicy:
    """How long a call may take: when its client set no deadline, and whatever deadline it set.

    Streams have no cap unless their full method name is in `caps_s`, which also overrides the cap of unary calls.
    """

    unary_cap_s: float = 30.0
    longest_s: float = 3600.0  # of a unary call
    caps_s: Mapping[str, float] = field(default_factory=dict)

    def cap_s(self, call: Call) -> float | None:
        return self.caps_s.get(call.method, None if call.streaming else self.unary_cap_s)


class AioDeadline(AioInterceptor):
    """Cancels a handler at the cap; at a client's own deadline gRPC cancels it."""

    def __init__(self, policy: DeadlinePolicy) -> None:
        super().__init__()
        self._policy = policy

    @asynccontextmanager
    async def around(self, call: Call) -> AsyncIterator[None]:
        cap_s = _cap_s(self._policy, call)
        timeout = asyncio.timeout(cap_s)
        try:
            async with timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise _exceeded(call, cap_s) from None


class SyncDeadline(SyncInterceptor):
    """Refuses calls that come too late. A thread cannot be cancelled: a handler that loops asks `context.is_active`."""

    def __init__(self, policy: DeadlinePolicy) -> None:
        super().__init__()
        self._policy = policy

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        _cap_s(self._policy, call)
        yield


def _cap_s(policy: DeadlinePolicy, call: Call) -> float | None:
    """Seconds after which the server itself ends the call. Raises DeadlineExceeded when the client's have passed."""
    remaining_s = call.remaining_s()
    if remaining_s is None:
        return policy.cap_s(call)
    if remaining_s <= 0:
        raise _exceeded(call, 0.0)
    return policy.longest_s if remaining_s > policy.longest_s and not call.streaming else None


def _exceeded(call: Call, cap_s: float | None) -> DeadlineExceeded:
    if not cap_s:
        return DeadlineExceeded(f"the deadline of {call.method} had passed before the call began")
    return DeadlineExceeded(f"{call.method} did not finish within {cap_s:g} s, the server's cap")
