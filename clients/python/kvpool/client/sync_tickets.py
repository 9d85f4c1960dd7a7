"""Stores and loads in progress, for code without an event loop. Thread-safe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool.client.pool_values import BlockHold, LoadReport, LoadTicket, StoreReport, StoreTicket

if TYPE_CHECKING:
    from kvpool.client.sync import BackgroundLoop


class SyncLoadTicket:
    """LoadTicket for code without an event loop."""

    def __init__(self, loop: BackgroundLoop, ticket: LoadTicket) -> None:
        self._loop = loop
        self._ticket = ticket

    @property
    def layers_loaded(self) -> int:
        """Leading layers that are in for every chunk that has not failed."""
        return self._ticket.layers_loaded

    @property
    def failed_chunks(self) -> tuple[int, ...]:
        """Chunks that have failed so far."""
        return self._ticket.failed_chunks

    def wait_layers(self, layers: int, timeout_s: float | None = None) -> bool:
        """See LoadTicket.wait_layers; costs next to nothing when they are in. raises: DeadlineExceeded."""
        if self._ticket.layers_loaded >= layers:
            return True
        return self._loop.run(lambda: self._ticket.wait_layers(layers), timeout_s)

    def report(self, timeout_s: float | None = None) -> LoadReport:
        """See LoadTicket.report. raises: DeadlineExceeded; the load goes on."""
        return self._loop.run(self._ticket.report, timeout_s)


class SyncStoreTicket:
    """StoreTicket for code without an event loop."""

    def __init__(self, loop: BackgroundLoop, ticket: StoreTicket, timeout_s: float) -> None:
        self._loop = loop
        self._ticket = ticket
        self._timeout_s = timeout_s

    @property
    def hold(self) -> BlockHold:
        """Whether the blocks may be reused; `ended` can be read in any thread."""
        return self._ticket.hold

    def wait_reusable(self, timeout_s: float | None = None) -> None:
        """Return when the engine may reuse the blocks. raises: DeadlineExceeded; then they are still held."""
        self._loop.run(self._ticket.wait_reusable, timeout_s)

    def report(self, timeout_s: float | None = None) -> StoreReport:
        """The end of the store, or what is known of it by then."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return self._loop.run(lambda: self._ticket.report(limit_s))
