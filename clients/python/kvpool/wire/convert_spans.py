"""Spans of pages and what is answered of them <-> their messages, array by array: no object a page on either side."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvpool.core.addresses import check_address
from kvpool.core.cluster import RemoteSource
from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.retention import Retention
from kvpool.core.spans import NO_GRANTS, NO_PAGES, Int32s, PageGrants, PageSpan, SpanAnswer
from kvpool.v1 import common_pb2
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.convert import check_count, check_id, convert_items, item_error_from_proto, item_error_to_proto

MAX_SOURCES = 16
"""Of one page, besides this node."""
_MAX_CHUNK_INDEX = (1 << 48) - 1


def remote_source_to_proto(source: RemoteSource) -> pb.RemoteSource:
    return pb.RemoteSource(node_id=source.node_id, incarnation=source.incarnation, bulk_endpoint=source.bulk_endpoint)


def remote_source_from_proto(message: pb.RemoteSource) -> RemoteSource:
    """Raises InvalidRequest."""
    return RemoteSource(
        node_id=check_id(message.node_id, "node_id"),
        incarnation=message.incarnation,
        bulk_endpoint=check_address(message.bulk_endpoint, "bulk_endpoint"),
    )


def page_span_to_proto(span: PageSpan) -> pb.PageSpan:
    return pb.PageSpan(
        keyspace_id=span.keyspace,
        chunk_hashes=span.chunk_hashes,
        first_chunk_index=span.first_chunk_index,
        parent_hash=span.parent_hash,
        group_head_hashes=span.group_heads,
        positions=span.positions.tolist(),
        shards=span.shards.tobytes(),
        retention=[
            pb.RetentionRun(
                chunk_count=count,
                retention=common_pb2.Retention(
                    ttl_ms=kept.ttl_ms, priority=kept.priority, pinned_until_us=kept.pinned_until_us
                ),
            )
            for count, kept in span.retention
        ],
        prompt_tokens=span.prompt_tokens,
        sources=[
            pb.SourceRun(chunk_count=count, sources=[remote_source_to_proto(source) for source in sources])
            for count, sources in span.sources
        ],
    )


def page_span_from_proto(message: pb.PageSpan, most: int) -> PageSpan:
    """most: pages, and chunks. Raises InvalidRequest naming the field."""
    if len(message.positions) > most:
        raise InvalidRequest(f"positions names {len(message.positions)} pages, at most {most} are allowed; split it")
    chunk_count = -(-len(message.chunk_hashes) // 16)
    if chunk_count > most:
        raise InvalidRequest(f"chunk_hashes names {chunk_count} chunks, at most {most} are allowed; split it")
    positions = np.array(message.positions, np.uint32)  # as on the wire
    return PageSpan(
        keyspace=message.keyspace_id,
        chunk_hashes=message.chunk_hashes,
        first_chunk_index=check_count(message.first_chunk_index, "first_chunk_index", most=_MAX_CHUNK_INDEX),
        parent_hash=message.parent_hash,
        group_heads=message.group_head_hashes,
        positions=positions.view(np.int32),  # refused if it is negative now
        shards=np.frombuffer(message.shards, np.uint8),
        retention=tuple(convert_items(message.retention, _retention_run, "retention run", most=chunk_count)),
        prompt_tokens=check_count(message.prompt_tokens, "prompt_tokens"),
        sources=tuple(convert_items(message.sources, _source_run, "source run", most=chunk_count)),
    )


def span_answer_to_proto(answer: SpanAnswer, *, final: bool) -> pb.SpanAnswer:
    granted = answer.granted
    return pb.SpanAnswer(
        pages=granted.pages.tolist(),
        lease_ids=granted.lease_ids.tolist(),
        segment_ids=granted.segment_ids.tolist(),
        offsets=granted.offsets.tolist(),
        sources=granted.sources.tobytes(),
        exists=answer.exists.tolist(),
        pending=answer.pending.tolist(),
        failed=[
            pb.SpanFailure(page=page, error=None if error is None else item_error_to_proto(error))
            for page, error in answer.failed
        ],
        final=final,
    )


def span_answer_from_proto(message: pb.SpanAnswer, page_count: int) -> SpanAnswer:
    """page_count: of the span. Raises InvalidRequest for what contradicts itself, or names pages of no such span."""
    count = len(message.pages)
    if not count == len(message.lease_ids) == len(message.segment_ids) == len(message.offsets) == len(message.sources):
        raise InvalidRequest("pages, lease_ids, segment_ids, offsets and sources must be of one length")
    granted = NO_GRANTS
    if count:
        granted = PageGrants(
            pages=_pages(message.pages, page_count),
            lease_ids=np.array(message.lease_ids, np.int64),
            segment_ids=np.array(message.segment_ids, np.int64),
            offsets=np.array(message.offsets, np.int64),
            sources=np.frombuffer(message.sources, np.uint8),
        )
        if int(granted.lease_ids.min()) <= 0:
            raise InvalidRequest("the pagestore granted a slot without a lease id")
    failed = tuple((one.page, _failure(one)) for one in message.failed)
    if any(page >= page_count for page, _ in failed):
        raise InvalidRequest(f"an answer names a page that is not one of {page_count}")
    return SpanAnswer(
        granted=granted,
        exists=_pages(message.exists, page_count),
        pending=_pages(message.pending, page_count),
        failed=failed,
    )


class AnsweredPages:
    """Pages of a span that answers have named: each is to be named once."""

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self._counts = np.zeros(page_count, np.int64)

    def note(self, answer: SpanAnswer, *, final: bool) -> None:
        """Raises InvalidRequest for a page that is named again, and after the last answer for one that never was."""
        named = answer.granted.pages
        if answer.exists.size or answer.pending.size or answer.failed:
            failed = np.array([page for page, _ in answer.failed], np.int64)
            named = np.concatenate((named, answer.exists, answer.pending, failed))
        self._counts += np.bincount(named, minlength=self._counts.size)
        if self._counts.size and int(self._counts.max()) > 1:
            raise InvalidRequest(f"page {int(self._counts.argmax())} of a span was answered twice")
        if final and self._counts.size and not int(self._counts.min()):
            raise InvalidRequest(f"page {int(self._counts.argmin())} of a span was not answered")


def _pages(numbers: Collection[int], page_count: int) -> Int32s:
    if not numbers:
        return NO_PAGES
    pages = np.array(numbers, np.int64)
    if int(pages.max()) >= page_count:
        raise InvalidRequest(f"an answer names page {int(pages.max())} of {page_count}")
    return pages.astype(np.int32)


def _failure(message: pb.SpanFailure) -> KvPoolError | None:
    return item_error_from_proto(message.error) if message.HasField("error") else None


def _retention_run(message: pb.RetentionRun) -> tuple[int, Retention]:
    kept = message.retention
    retention = Retention(kept.ttl_ms, kept.priority, kept.pinned_until_us)
    retention.check()
    return check_count(message.chunk_count, "chunk_count", least=1), retention


def _source_run(message: pb.SourceRun) -> tuple[int, tuple[RemoteSource, ...]]:
    sources: Sequence[RemoteSource] = convert_items(
        message.sources, remote_source_from_proto, "source", most=MAX_SOURCES
    )
    return check_count(message.chunk_count, "chunk_count", least=1), tuple(sources)
