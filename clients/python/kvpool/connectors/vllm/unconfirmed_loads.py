"""Requests whose KV another connector of a MultiConnector may still be loading, or may yet report as not loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.connectors.vllm.request_chain import Request, final_tokens, scheduled_among


@dataclass(slots=True)
class _Admitted:
    """counted_tokens: that vLLM took for computed when it first scheduled the request; None before."""

    request: Request
    held_tokens: int
    counted_tokens: int | None = None

    @property
    def confirmed(self) -> bool:
        """A request whose load fails loses the output of its step: output beyond the load shows that it came in."""
        return self.counted_tokens is not None and final_tokens(self.request) > self.counted_tokens


class UnconfirmedLoads:
    """Unconfirmed requests of one scheduler.

    vLLM counts tokens as computed from the moment on in which a connector begins to load them: of asynchronous loads,
    after which it admits the request again, and of those in a step itself. It does not notify a child of the loads of
    others.
    """

    def __init__(self) -> None:
        self._admitted: dict[str, _Admitted] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._admitted

    def admitted(self, request: Request, held_tokens: int) -> None:
        """vLLM has admitted a request which this connector does not load. held_tokens: found in vLLM's own cache."""
        self.forget(request.request_id)
        if not request.num_computed_tokens:  # else it was admitted before, for a load that has ended
            self._admitted[request.request_id] = _Admitted(request, held_tokens)

    def forget(self, request_id: str) -> None:
        """Whatever is loaded for the request, this connector does it."""
        self._admitted.pop(request_id, None)

    def finished(self, request: Request) -> bool:
        """Forget a request that has ended. Returns whether it was unconfirmed until then."""
        admitted = self._admitted.pop(request.request_id, None)
        return admitted is not None and not admitted.confirmed

    def step(self, scheduled: Mapping[str, int]) -> Mapping[str, int]:
        """Confirm those of the scheduled requests for which nothing is loaded, or everything has come in. Returns all
        that are confirmed.

        Beside a load in the step itself other requests may have found its blocks in vLLM's cache.
        """
        if not self._admitted:
            return scheduled
        loading = False
        for request_id in scheduled_among(scheduled, self._admitted):
            admitted = self._admitted[request_id]
            if admitted.counted_tokens is None:
                counted = admitted.counted_tokens = admitted.request.num_computed_tokens
                loading |= counted > admitted.held_tokens
                confirmed = not (loading and counted)
            else:
                confirmed = admitted.confirmed
            if confirmed:
                del self._admitted[request_id]
        return {one: count for one, count in scheduled.items() if one not in self._admitted}
