"""Loads that a forward pass waits for layer by layer, so that the first layers compute while the last ones come in."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvpool.client.pool_values import LoadReport, LoadTicket
from kvpool.connectors.vllm.link import PoolLink
from kvpool.connectors.vllm.orders import LoadOrder
from kvpool.core.errors import KvPoolError

# The agent keeps to a load's deadline itself; so much longer is its answer waited for.
_GRACE_S = 1.0


@dataclass(slots=True)
class _Running:
    order: LoadOrder
    ticket: Future[LoadTicket]


class LayerLoads:
    """Of one engine step. On the engine's thread."""

    def __init__(self, link: PoolLink, on_ended: Callable[[LoadOrder, LoadReport | None, str], None]) -> None:
        self._link, self._on_ended = link, on_ended
        self._running: list[_Running] = []

    def begin(self, order: LoadOrder, load: Callable[[], LoadTicket]) -> None:
        """load: begins it, on the pool's loop. raises: ServiceUnavailable."""

        async def begin() -> LoadTicket:
            return load()

        self._running.append(_Running(order, self._link.start(begin)))

    def wait_layers(self, layers: int) -> None:
        """Return when so many leading layers of everything are in, or will not come: then `finish` says so."""
        for running in self._running:
            self._wait(running, layers)

    def finish(self) -> None:
        """The step is over: nothing touches the blocks after this. Those that did not come are told of."""
        loads, self._running = self._running, []
        for running in loads:
            try:
                report = self._link.start(partial(_report, running.ticket)).result()
                self._on_ended(running.order, report, str(report.error) if report.error is not None else "")
            except (KvPoolError, concurrent.futures.CancelledError) as error:
                self._on_ended(running.order, None, str(error))

    def _wait(self, running: _Running, layers: int) -> None:
        limit_s = running.order.timeout_s + _GRACE_S
        try:
            ticket = running.ticket.result(limit_s)
            if ticket.layers_loaded < layers and not ticket.done:
                self._link.start(lambda: ticket.wait_layers(layers)).result(limit_s)
        except (KvPoolError, TimeoutError, concurrent.futures.CancelledError):
            return  # `finish` will say so


async def _report(ticket: Future[LoadTicket]) -> LoadReport:
    report = await ticket.result().report()
    # The engine computes in these very blocks what did not come: not before the agent has stopped to write there.
    await report.hold.wait()
    return report
