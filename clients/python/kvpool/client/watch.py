"""Events of the index, across reconnects."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.client.channel import streamed
from kvpool.client.endpoints import Endpoints
from kvpool.client.retry import TRANSIENT, Backoff
from kvpool.core.cluster import HeartbeatEvent, IndexEvent, ResyncEvent
from kvpool.core.errors import KvPoolError, ServiceUnavailable, StoreUnavailable
from kvpool.v1 import index_pb2
from kvpool.wire.convert_watch import index_event_from_proto

if TYPE_CHECKING:
    from kvpool.v1.index_pb2_grpc import IndexServiceAsyncStub


_CURABLE: tuple[type[KvPoolError], ...] = (*TRANSIENT, StoreUnavailable)
_DRIFT = 1e-4  # how much faster one of the two clocks may run
_LATE_S = 2.0  # a replica has no use of heartbeats that come much later
_PATIENCE_S = 10.0
_log = logging.getLogger(__name__)


async def watch_events(
    endpoints: Endpoints[IndexServiceAsyncStub],
    *,
    keyspace: bytes,
    for_replica: bool = False,
    now_s: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[IndexEvent]:
    """Yield events, at least once each; after a break it resumes behind the last one it yielded.

    A break before the first event may have lost some: a ResyncEvent says so. A watch for a replica needs none from
    here, because the index begins it with one.
    """
    position = ""
    opened_before = False
    backoff = Backoff(endpoints.config.backoff_initial_s, endpoints.config.backoff_max_s)
    while True:
        if opened_before and not position and not for_replica:
            yield IndexEvent(position="", event=ResyncEvent(cause="the watch reconnected before its first event"))
        endpoint = endpoints.endpoint
        try:
            async with aclosing(_watch_once(endpoints, keyspace, position, for_replica, now_s)) as events:
                async for event in events:
                    position = event.position
                    opened_before = True
                    backoff.reset()
                    yield event
            raise ServiceUnavailable("the index ended the watch")
        except _CURABLE as error:
            opened_before = True
            endpoints.fail(endpoint)
            pause_s = backoff.next_s()
            _log.info("watch of the index broke, next try in %.2f s: %s", pause_s, error)
        await asyncio.sleep(pause_s)


async def _watch_once(
    endpoints: Endpoints[IndexServiceAsyncStub],
    keyspace: bytes,
    position: str,
    for_replica: bool,
    now_s: Callable[[], float],
) -> AsyncGenerator[IndexEvent]:
    request = index_pb2.WatchRequest(after_position=position, keyspace_id=keyspace, for_replica=for_replica)
    transit = Transit(now_s())
    config = endpoints.config
    with streamed(lambda: endpoints.stub().Watch(request, metadata=config.metadata), config.tls) as call:
        async for message in call:
            event = index_event_from_proto(message)
            if event is None:
                continue  # of a kind that only a newer index knows; what follows takes the position along
            if isinstance(event.event, HeartbeatEvent) and event.event.watch_age_ms:
                event = replace(event, event=_aged(event.event, transit, now_s()))
                if transit.is_adrift:
                    raise ServiceUnavailable("heartbeats only seem late: how long the watch took to open is not known")
            yield event


def _aged(heartbeat: HeartbeatEvent, transit: Transit, now_s: float) -> HeartbeatEvent:
    """With the time that it waited for us: a process that was stopped finds heartbeats of long ago."""
    delay_s = transit.delay_s(heartbeat.watch_age_ms / 1e3, now_s)
    return replace(heartbeat, age_ms=heartbeat.age_ms + round(delay_s * 1e3))


class Transit:
    """Of one stream. Time is passed in.

    The two clocks have nothing in common but their speed. What is known of their distance: the sender opened the stream
    after we asked for it. So a message is never taken for younger than it is; by as much as the opening took, and that
    shrinks by 0.1 ms a second, for older. That is too slow where the opening took long, or the sender's clock stood
    still with its machine: then the two clocks have diverged, and a new stream is needed.
    """

    def __init__(self, asked_at_s: float) -> None:
        """asked_at_s: when the stream was asked for, by our clock."""
        self._opened_at_s = asked_at_s  # when the sender opened it, by our clock, or a little before
        self._looked_at_s = asked_at_s
        self._late_since_s: float | None = None  # when the first came of those that were all late

    @property
    def is_adrift(self) -> bool:
        """Whether all messages of ten seconds were late: what waited is read in less."""
        return self._late_since_s is not None and self._looked_at_s - self._late_since_s >= _PATIENCE_S

    def delay_s(self, sent_s: float, now_s: float) -> float:
        """Of a message that is taken up now. sent_s: seconds since the sender opened the stream, by its clock."""
        self._opened_at_s += _DRIFT * max(0.0, now_s - self._looked_at_s)
        self._looked_at_s = now_s
        self._opened_at_s = min(self._opened_at_s, now_s - sent_s)
        delay_s = now_s - sent_s - self._opened_at_s
        if delay_s < _LATE_S:
            self._late_since_s = None
        elif self._late_since_s is None:
            self._late_since_s = now_s
        return delay_s
