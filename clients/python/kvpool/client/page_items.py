"""What is asked of a pagestore session and what it answers, as plain values, and their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kvpool.core.cluster import PageMetadata, RemoteSource
from kvpool.core.errors import InvalidRequest, KvPoolError, NotServed
from kvpool.core.outcome import Admission, Outcome
from kvpool.core.page import PageKey
from kvpool.v1 import common_pb2, pagestore_pb2
from kvpool.wire.convert import enum_from_proto, is_newer, item_error_from_proto
from kvpool.wire.convert_pages import page_metadata_to_proto
from kvpool.wire.convert_spans import remote_source_to_proto

_NEWER = "of a newer pagestore; upgrade this side to use it"


class PageSource(IntEnum):
    """Where the bytes of a hit came from. The numbers are those of the wire."""

    STAGING = 1
    DISK = 2
    REMOTE = 3


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the arena under a lease."""

    lease_id: int
    segment_id: int
    offset: int
    page_bytes: int  # header + payload

    @property
    def place(self) -> tuple[int, int, int]:
        """Where its bytes are: segment id, offset, size."""
        return self.segment_id, self.offset, self.page_bytes


@dataclass(frozen=True, slots=True)
class ReserveItem:
    """One page to be written; page_bytes is exact."""

    key: PageKey
    page_bytes: int
    metadata: PageMetadata


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """slot: only for RESERVED. error: only for REJECTED."""

    admission: Admission
    slot: Slot | None = None
    error: KvPoolError | None = None


@dataclass(frozen=True, slots=True)
class AcquireItem:
    """One page to be read; sources: where else it may be, best first; metadata: kept beside it if it is pulled."""

    key: PageKey
    sources: tuple[RemoteSource, ...] = ()
    metadata: PageMetadata | None = None


@dataclass(frozen=True, slots=True)
class AcquireResult:
    """A hit has slot and source; a miss has neither, and an error if something failed."""

    item_index: int
    slot: Slot | None = None
    source: PageSource | None = None
    error: KvPoolError | None = None


def slot_from_proto(message: pagestore_pb2.Slot) -> Slot:
    """raises: InvalidRequest for a lease id of 0."""
    if message.lease_id <= 0:
        raise InvalidRequest("the pagestore granted a slot without a lease id")
    return Slot(message.lease_id, message.segment_id, message.offset, message.page_bytes)


def reserve_to_proto(items: Sequence[ReserveItem]) -> pagestore_pb2.ReserveRequest:
    """One `reserve` of several pages."""
    return pagestore_pb2.ReserveRequest(
        items=[
            pagestore_pb2.ReserveItem(
                key=item.key.pack(), page_bytes=item.page_bytes, metadata=page_metadata_to_proto(item.metadata)
            )
            for item in items
        ]
    )


def reserve_result_from_proto(message: pagestore_pb2.ReserveResult) -> ReserveResult:
    """raises: InvalidRequest for an admission that is not set."""
    if is_newer(message.admission, Admission):
        error = NotServed(f"admission {message.admission} is {_NEWER}")
        return ReserveResult(
            Admission.REJECTED, None, optional_error(message.error, message.HasField("error")) or error
        )
    admission = enum_from_proto(message.admission, Admission, "admission")
    return ReserveResult(
        admission,
        slot_from_proto(message.slot) if admission is Admission.RESERVED else None,
        optional_error(message.error, message.HasField("error")),
    )


def acquire_to_proto(items: Sequence[AcquireItem], wait_ms: int) -> pagestore_pb2.AcquireRequest:
    """One `acquire` of several pages."""
    return pagestore_pb2.AcquireRequest(
        items=[
            pagestore_pb2.AcquireItem(
                key=item.key.pack(),
                sources=[remote_source_to_proto(source) for source in item.sources],
                metadata=page_metadata_to_proto(item.metadata) if item.metadata is not None else None,
            )
            for item in items
        ],
        wait_ms=wait_ms,
    )


def acquire_result_from_proto(message: pagestore_pb2.AcquireResult) -> AcquireResult:
    """raises: InvalidRequest for an outcome or source that is not set."""
    error = optional_error(message.error, message.HasField("error"))
    if is_newer(message.outcome, Outcome):
        return AcquireResult(message.item_index, error=error or NotServed(f"outcome {message.outcome} is {_NEWER}"))
    if enum_from_proto(message.outcome, Outcome, "outcome") is not Outcome.HIT:
        return AcquireResult(message.item_index, error=error)
    newer = is_newer(message.source, PageSource)
    source = PageSource.REMOTE if newer else enum_from_proto(message.source, PageSource, "source")
    return AcquireResult(message.item_index, slot_from_proto(message.slot), source)


def optional_error(message: common_pb2.ItemError, is_set: bool) -> KvPoolError | None:
    """The error of one item, or None if it was served."""
    return item_error_from_proto(message) if is_set else None
