"""Renewals of leases: those that come within a moment, on whichever stream, are renewed in the store together."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool.core.cluster import LeaseRenewal
from kvpool.core.errors import KvPoolError, Overloaded
from kvpool_index.config import IndexConfig
from kvpool_index.core.nodes import Renewal
from kvpool_index.engine_nodes import NodeService
from kvpool_index.engine_policies import PolicyService

_GATHER_S: Final = 0.05
_WAITING_MAX: Final = 1 << 17  # renewals that wait for the store at once

Refusals = list[KvPoolError | None]
"""For each renewal why it was refused; None for one that was done."""


@dataclass(slots=True, eq=False)
class _Waiting:
    renewals: Sequence[Renewal]
    answer: asyncio.Future[tuple[Refusals, int]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class LeaseService:
    """Gathers renewals for the store, and says how long a lease lives."""

    def __init__(self, nodes: NodeService, policies: PolicyService, config: IndexConfig) -> None:
        self._nodes = nodes
        self._policies = policies
        self._config = config
        self._waiting: list[_Waiting] = []
        self._waiting_count = 0
        self._task: asyncio.Task[None] | None = None

    async def renew(self, renewals: Sequence[Renewal]) -> tuple[Refusals, LeaseRenewal, LeaseRenewal]:
        """Why each was refused, and what holds for the others: with a load, without one. Raises StoreUnavailable."""
        if self._waiting_count + len(renewals) > _WAITING_MAX:
            raise Overloaded(f"{self._waiting_count} renewals of leases wait for the store")
        waiting = _Waiting(renewals)
        self._waiting.append(waiting)
        self._waiting_count += len(renewals)
        if self._task is None:
            self._task = asyncio.create_task(self._renew_waiting(), name="renew-leases")
        refusals, version = await waiting.answer
        config = self._config
        return (
            refusals,
            LeaseRenewal(
                lease_ttl_ms=config.lease_ttl_ms, policy_version=version, renew_interval_ms=config.renew_interval_ms
            ),
            LeaseRenewal(
                lease_ttl_ms=config.idle_lease_ttl_ms,
                policy_version=version,
                renew_interval_ms=config.idle_lease_ttl_ms // 3,
            ),
        )

    async def close(self) -> None:
        """Renew no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _renew_waiting(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(_GATHER_S)
                waiting, self._waiting, self._waiting_count = self._waiting, [], 0
                await self._renew(waiting)
        finally:
            self._task = None
            for each in self._waiting:
                each.answer.cancel()

    async def _renew(self, waiting: Sequence[_Waiting]) -> None:
        try:
            version = await self._policies.version()
            refusals = await self._nodes.renew([one for each in waiting for one in each.renewals])
        except Exception as error:
            for each in waiting:
                if not each.answer.done():
                    each.answer.set_exception(error)
            return
        at = 0
        for each in waiting:
            if not each.answer.done():  # else its stream has ended
                each.answer.set_result((refusals[at : at + len(each.renewals)], version))
            at += len(each.renewals)
