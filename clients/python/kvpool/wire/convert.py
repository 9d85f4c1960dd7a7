"""Bytes, enums, small messages and batches of messages: what all converters share. Malformed input raises
InvalidRequest."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.retention import Retention
from kvpool.v1 import common_pb2
from kvpool.wire.status import error_from_reason

HASH_BYTES = 16

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
EnumT = TypeVar("EnumT", bound=IntEnum)
# Generated classes; those that are batched have a field `batched` of their own class.
MessageT = TypeVar("MessageT", bound=Any)

# What a message costs beside its bytes is spread over so many already; a receiver serves them without a pause.
BATCH_MESSAGES_MAX = 64
_BATCH_BYTES_MAX = 64 << 10  # far below what any peer takes in one gRPC message


def check_length(value: bytes, size_bytes: int, name: str) -> bytes:
    """`value`, if it has exactly `size_bytes`. Raises InvalidRequest naming the field."""
    if len(value) != size_bytes:
        raise InvalidRequest(f"{name} must be {size_bytes} bytes, got {len(value)}; send it in binary form")
    return value


def check_id(value: bytes, name: str) -> bytes:
    """A 16-byte hash, keyspace id, node id or session id."""
    return check_length(value, HASH_BYTES, name)


def check_optional_id(value: bytes, name: str) -> bytes:
    """A 16-byte hash or id, or empty."""
    return check_length(value, HASH_BYTES, name) if value else value


def check_count(value: int, name: str, *, least: int = 0, most: int | None = None) -> int:
    """`value`, if least <= value <= most. Raises InvalidRequest naming the field."""
    if value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise InvalidRequest(f"{name} must be {bounds}, got {value}")
    return value


def enum_from_proto(value: int, kind: type[EnumT], name: str) -> EnumT:
    """The member of `kind` with the wire's number. Raises InvalidRequest for 0 and unknown numbers."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f"{member.name}={member.value}" for member in kind)
        raise InvalidRequest(f"{name} {value} is unspecified or unknown; use one of {known}") from None


def is_newer(value: int, kind: type[IntEnum]) -> bool:
    """Whether an answer holds a value that only a newer release has a name for.

    Such an answer is no error: the part of it that the value is about counts as not there.
    """
    return value > _largest(kind)


@cache
def _largest(kind: type[IntEnum]) -> int:
    return max(kind)  # an enumeration goes through its members in Python, and answers are many


def hashes_to_bytes(hashes: Iterable[bytes]) -> bytes:
    """Concatenate 16-byte hashes. Raises InvalidRequest with the index of a malformed one."""
    parts = list(hashes)
    for index, value in enumerate(parts):
        if len(value) != HASH_BYTES:
            raise InvalidRequest(f"hash {index} must be {HASH_BYTES} bytes, got {len(value)}", item_index=index)
    return b"".join(parts)


def hashes_from_bytes(packed: bytes, name: str = "chunk_hashes", *, most: int | None = None) -> list[bytes]:
    """Split concatenated 16-byte hashes. Raises InvalidRequest for a part left over or more than `most`."""
    count, left = divmod(len(packed), HASH_BYTES)
    if left:
        message = f"{name} has {len(packed)} bytes: item {count} is cut off; send {HASH_BYTES} bytes a hash"
        raise InvalidRequest(message, item_index=count)
    if most is not None and count > most:
        raise InvalidRequest(f"{name} has {count} hashes, at most {most} are allowed; split the request")
    return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]


def convert_items(
    items: Sequence[ItemT], convert: Callable[[ItemT], ResultT], name: str = "item", *, most: int | None = None
) -> list[ResultT]:
    """Convert a batch all or nothing. Raises InvalidRequest that names the failed item and carries its index."""
    if most is not None and len(items) > most:
        raise InvalidRequest(f"{len(items)} {name}s in one batch, at most {most} are allowed; split the request")
    results: list[ResultT] = []
    for index, item in enumerate(items):
        try:
            results.append(convert(item))
        except InvalidRequest as error:
            raise InvalidRequest(f"{name} {index}: {error.message}", item_index=index) from error
    return results


def retention_to_proto(retention: Retention) -> common_pb2.Retention:
    """Retention as it travels."""
    return common_pb2.Retention(
        ttl_ms=retention.ttl_ms, priority=retention.priority, pinned_until_us=retention.pinned_until_us
    )


def retention_from_proto(message: common_pb2.Retention, name: str = "retention") -> Retention:
    """Raises InvalidRequest."""
    retention = Retention(ttl_ms=message.ttl_ms, priority=message.priority, pinned_until_us=message.pinned_until_us)
    retention.check(name)
    return retention


def item_error_to_proto(error: KvPoolError) -> common_pb2.ItemError:
    """Why one item of a batch was not served."""
    return common_pb2.ItemError(reason=error.reason, message=error.message)


def item_error_from_proto(message: common_pb2.ItemError) -> KvPoolError:
    """The error that `message` speaks of; a plain KvPoolError if this version does not know the reason."""
    return error_from_reason(message.reason, message.message)


def batch(queue: deque[MessageT]) -> MessageT:
    """Take the first messages out of a queue, which is not empty, as one: those behind the first are in its `batched`.

    One alone is returned as it is. The messages are not changed.
    """
    first = queue.popleft()
    if not queue:
        return first
    others: list[MessageT] = []
    size_bytes = first.ByteSize()
    while queue and len(others) < BATCH_MESSAGES_MAX - 1:
        size_bytes += queue[0].ByteSize()
        if size_bytes > _BATCH_BYTES_MAX:
            break
        others.append(queue.popleft())
    if not others:
        return first
    batched: MessageT = type(first)(batched=others)
    batched.MergeFrom(first)
    return batched


def unbatch(message: MessageT) -> Sequence[MessageT]:
    """Return the messages that `batch` has put together, in order; `message` is not used any more.

    raises: InvalidRequest for more than BATCH_MESSAGES_MAX, and for a batch in a batch.
    """
    others = getattr(message, "batched", ())
    if not others:
        return (message,)
    if len(others) >= BATCH_MESSAGES_MAX:
        raise InvalidRequest(f"`batched` may have {BATCH_MESSAGES_MAX - 1} messages, got {len(others)}")
    if any(other.batched for other in others):
        raise InvalidRequest("messages in `batched` must have none themselves")
    # Copies: each would keep the memory of the whole message.
    copies = [_copy(other) for other in others]
    message.ClearField("batched")
    return (_copy(message), *copies)


def _copy(message: MessageT) -> MessageT:
    copied: MessageT = type(message)()
    copied.CopyFrom(message)
    return copied
