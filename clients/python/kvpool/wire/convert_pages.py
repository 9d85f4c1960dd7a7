"""Page keys and the metadata of pages <-> messages. Malformed input raises InvalidRequest naming the field."""

from __future__ import annotations

from typing import Protocol

from kvpool.core.cluster import PageMetadata
from kvpool.core.page import KEY_BYTES, PageKey
from kvpool.v1 import common_pb2
from kvpool.wire.convert import check_count, check_id, check_length


class PageMetadataLike(Protocol):
    """Any value with the fields of PageMetadata: services keep their own."""

    @property
    def parent_hash(self) -> bytes: ...
    @property
    def chunk_index(self) -> int: ...
    @property
    def group_head_hash(self) -> bytes: ...
    @property
    def ttl_ms(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def pinned_until_us(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def expires_us(self) -> int: ...


def page_key_from_proto(value: bytes, name: str = "key") -> PageKey:
    """A 34-byte page key. Raises InvalidRequest."""
    return PageKey.unpack(check_length(value, KEY_BYTES, name))


def page_metadata_to_proto(metadata: PageMetadataLike) -> common_pb2.PageMetadata:
    """Unset retention when all of it is the default."""
    retention = None
    if metadata.ttl_ms or metadata.priority or metadata.pinned_until_us:
        retention = common_pb2.Retention(
            ttl_ms=metadata.ttl_ms, priority=metadata.priority, pinned_until_us=metadata.pinned_until_us
        )
    return common_pb2.PageMetadata(
        parent_hash=metadata.parent_hash,
        chunk_index=metadata.chunk_index,
        group_head_hash=metadata.group_head_hash,
        retention=retention,
        prompt_tokens=metadata.prompt_tokens,
        expires_us=metadata.expires_us,
    )


def page_metadata_from_proto(message: common_pb2.PageMetadata) -> PageMetadata:
    """Raises InvalidRequest."""
    retention = message.retention
    return PageMetadata(
        parent_hash=check_id(message.parent_hash, "metadata.parent_hash"),
        chunk_index=check_count(message.chunk_index, "metadata.chunk_index"),
        group_head_hash=check_id(message.group_head_hash, "metadata.group_head_hash"),
        ttl_ms=check_count(retention.ttl_ms, "metadata.retention.ttl_ms"),
        priority=check_count(retention.priority, "metadata.retention.priority", least=-100, most=100),
        pinned_until_us=check_count(retention.pinned_until_us, "metadata.retention.pinned_until_us"),
        prompt_tokens=check_count(message.prompt_tokens, "metadata.prompt_tokens"),
        expires_us=check_count(message.expires_us, "metadata.expires_us"),
    )
