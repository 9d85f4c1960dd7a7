"""Messages of the control service <-> values of the engine. Malformed input raises InvalidRequest naming the item."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.outcome import Admission
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert import check_count, check_id, check_optional_id, convert_items, item_error_to_proto
from kvpool.wire.convert_keyspace import session_keyspace_from_proto
from kvpool.wire.convert_pages import page_key_from_proto, page_metadata_from_proto
from kvpool.wire.convert_spans import MAX_SOURCES, remote_source_from_proto
from kvpool.wire.versions import check_peer_version
from kvpool_pagestore.core.page_table import Grant
from kvpool_pagestore.core.slots import PageRecord
from kvpool_pagestore.engine.fetch import Acquired, PageRequest, Source
from kvpool_pagestore.engine.pages import ReserveAnswer
from kvpool_pagestore.engine.removal import MAX_EVICT_CHUNKS, EvictTarget
from kvpool_pagestore.engine.sessions import SessionRequest

_MAX_PEER_NAME_CHARS = 128
_MAX_WAIT_MS = 600_000
DEFAULT_WAIT_MS = 30_000

_COMMITTED = pb.LeaseResult()
_SOURCES = {Source.STAGING: pb.SOURCE_STAGING, Source.DISK: pb.SOURCE_DISK, Source.REMOTE: pb.SOURCE_REMOTE}
_ADMISSIONS = {Admission.EXISTS: pb.ADMISSION_EXISTS, Admission.PENDING: pb.ADMISSION_PENDING}


def session_request_from_proto(message: pb.SessionOpen, tenant: str, address: str) -> SessionRequest:
    """tenant, address: of the caller."""
    check_peer_version(message.version, "the peer")
    if len(message.peer_name) > _MAX_PEER_NAME_CHARS:
        raise InvalidRequest(f"peer_name must be at most {_MAX_PEER_NAME_CHARS} characters")
    return SessionRequest(
        tenant=tenant,
        keyspaces=convert_items(message.keyspaces, session_keyspace_from_proto, "keyspace"),
        peer_name=message.peer_name,
        address=address,
        previous_session_id=check_optional_id(message.previous_session_id, "previous_session_id"),
        previous_drained=message.previous_drained,
        wants_arena=message.wants_arena,
        trusts_arena=message.trusts_arena,
    )


def chunk_hash_from_proto(value: bytes) -> bytes:
    return check_id(value, "chunk hash")


def evict_target_from_proto(message: pb.EvictRequest) -> EvictTarget:
    return EvictTarget(
        keyspace=check_id(message.keyspace_id, "keyspace_id"),
        chunk_hashes=convert_items(message.chunk_hashes, chunk_hash_from_proto, "chunk hash", most=MAX_EVICT_CHUNKS),
        whole_keyspace=message.whole_keyspace,
        staging_only=message.staging_only,
        with_pinned=message.with_pinned,
    )


def reserve_items_from_proto(message: pb.ReserveRequest, most: int) -> list[PageRecord]:
    return convert_items(message.items, _reserve_item, most=most)


def wanted_pages_from_proto(message: pb.AcquireRequest, most: int) -> list[PageRequest]:
    return convert_items(message.items, _wanted_page, most=most)


def wait_s_from_proto(message: pb.AcquireRequest | pb.AcquireSpanRequest) -> float:
    return (check_count(message.wait_ms, "wait_ms", most=_MAX_WAIT_MS) or DEFAULT_WAIT_MS) / 1e3


def reserve_results_to_proto(answers: Sequence[ReserveAnswer]) -> pb.ReserveResponse:
    return pb.ReserveResponse(results=[_reserve_result(answer) for answer in answers])


def lease_results_to_proto(errors: Sequence[KvPoolError | None]) -> pb.CommitResponse:
    return pb.CommitResponse(
        results=[_COMMITTED if error is None else pb.LeaseResult(error=item_error_to_proto(error)) for error in errors]
    )


def acquired_to_proto(acquired: Sequence[Acquired], final: bool) -> pb.AcquireResponse:
    return pb.AcquireResponse(results=[_acquire_result(one) for one in acquired], final=final)


def _reserve_item(message: pb.ReserveItem) -> PageRecord:
    return PageRecord(
        key=page_key_from_proto(message.key),
        page_bytes=check_count(message.page_bytes, "page_bytes", least=1),
        metadata=page_metadata_from_proto(message.metadata),
    )


def _wanted_page(message: pb.AcquireItem) -> PageRequest:
    if not message.sources:
        return PageRequest(key=page_key_from_proto(message.key))
    return PageRequest(
        key=page_key_from_proto(message.key),
        metadata=page_metadata_from_proto(message.metadata),
        sources=tuple(convert_items(message.sources, remote_source_from_proto, "source", most=MAX_SOURCES)),
    )


def _reserve_result(answer: ReserveAnswer) -> pb.ReserveResult:
    if isinstance(answer, Grant):
        return pb.ReserveResult(admission=pb.ADMISSION_RESERVED, slot=_slot(answer))
    if isinstance(answer, Admission):
        return pb.ReserveResult(admission=_ADMISSIONS[answer])
    return pb.ReserveResult(admission=pb.ADMISSION_REJECTED, error=item_error_to_proto(answer))


def _acquire_result(one: Acquired) -> pb.AcquireResult:
    if one.grant is not None and one.source is not None:
        return pb.AcquireResult(
            item_index=one.item_index, outcome=pb.OUTCOME_HIT, slot=_slot(one.grant), source=_SOURCES[one.source]
        )
    error = None if one.error is None else item_error_to_proto(one.error)
    return pb.AcquireResult(item_index=one.item_index, outcome=pb.OUTCOME_MISS, error=error)


def _slot(grant: Grant) -> pb.Slot:
    slot = grant.slot
    return pb.Slot(
        lease_id=grant.lease_id,
        segment_id=slot.segment.segment_id,
        offset=slot.offset,
        page_bytes=slot.page.page_bytes,
    )
