"""The stream on which a process renews its lease: a message each time, which costs the index far less than a call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from kvpool.client.endpoints import Endpoints
from kvpool.core.cluster import LeaseRenewal, NodeLoad
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable, StoreUnavailable
from kvpool.v1 import index_pb2
from kvpool.wire.convert import item_error_from_proto
from kvpool.wire.convert_cluster import node_load_to_proto
from kvpool.wire.status import StreamStatus

if TYPE_CHECKING:
    from grpc.aio import StreamStreamCall

    from kvpool.v1.index_pb2_grpc import IndexServiceAsyncStub

    _Call = StreamStreamCall[index_pb2.RenewLeasesRequest, index_pb2.RenewLeasesResponse]


_LATE_ANSWERS_MAX = 3  # timeouts of one renewal at the only endpoint, before the stream is taken for dead


class LeaseStream:
    """Opens the stream when it is first used, and again after a failure, at the endpoint that is in use then.

    A renewal that times out at the only endpoint stays on its way, and the next call waits for its answer: a busy index
    that takes longer than the timeout for each renewal would never complete one that is begun again each time.
    """

    def __init__(self, endpoints: Endpoints[IndexServiceAsyncStub]) -> None:
        self._endpoints = endpoints
        self._call: _Call | None = None
        self._status: StreamStatus | None = None
        self._answer: asyncio.Task[index_pb2.RenewLeasesResponse] | None = None  # of the renewal on its way
        self._renewing = (b"", 0)  # node and incarnation of it
        self._late_count = 0  # calls that waited for it and timed out

    async def renew(self, node_id: bytes, incarnation: int, load: NodeLoad | None, *, timeout_s: float) -> LeaseRenewal:
        """Renew one lease; one at a time. load: None for a node that holds nothing, whose lease lives longer.

        raises: LeaseLost, StaleIncarnation; StoreUnavailable, ServiceUnavailable, DeadlineExceeded.
        """
        renewal = index_pb2.LeaseToRenew(
            node_id=node_id, incarnation=incarnation, load=None if load is None else node_load_to_proto(load)
        )
        endpoint = self._endpoints.endpoint
        if self._renewing != (node_id, incarnation):
            self.close()
        if self._answer is None:
            self._renewing = node_id, incarnation
            self._answer = asyncio.create_task(self._exchange(index_pb2.RenewLeasesRequest(renewals=[renewal])))
        try:
            async with asyncio.timeout(timeout_s):
                answer = await asyncio.shield(self._answer)
            self._answer, self._late_count = None, 0
        except TimeoutError:
            self._late_count += 1
            if self._endpoints.count > 1 or self._late_count >= _LATE_ANSWERS_MAX:
                self.close()
                self._endpoints.fail(endpoint)
            raise DeadlineExceeded(f"the index did not renew the lease within {timeout_s:g} s") from None
        except StoreUnavailable:
            self.close()
            self._endpoints.leave(endpoint)
            raise
        except BaseException as error:
            self.close()
            if isinstance(error, KvPoolError):
                self._endpoints.fail(endpoint)
            raise
        if answer.refused:
            raise item_error_from_proto(answer.refused[0].error)
        return LeaseRenewal(
            lease_ttl_ms=answer.idle_lease_ttl_ms if load is None else answer.lease_ttl_ms,
            policy_version=answer.policy_version,
            renew_interval_ms=answer.idle_renew_interval_ms if load is None else answer.renew_interval_ms,
        )

    def close(self) -> None:
        """End the stream; the next renewal opens another one. Idempotent."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        answer, self._answer, self._late_count = self._answer, None, 0
        if answer is not None and not answer.cancel() and not answer.cancelled():
            answer.exception()  # retrieved, so that asyncio does not log it

    async def _exchange(self, request: index_pb2.RenewLeasesRequest) -> index_pb2.RenewLeasesResponse:
        config = self._endpoints.config
        if self._call is None:
            self._call = self._endpoints.stub().RenewLeases(metadata=config.metadata)
            self._status = StreamStatus(self._call, config.tls)
        assert self._status is not None
        try:
            await self._call.write(request)
            answer = await self._call.read()
        except (grpc.RpcError, asyncio.InvalidStateError, grpc.aio.UsageError) as error:
            raise self._status.error(error) from error
        if isinstance(answer, index_pb2.RenewLeasesResponse):
            return answer
        raise ServiceUnavailable("the index has ended the stream of renewals")
