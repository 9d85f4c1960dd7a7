"""Several messages of a stream in one gRPC message: one costs an event loop more than its bytes do."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from kvpool.core.errors import InvalidRequest

MessageT = TypeVar(
    "MessageT", bound=Any
)  # generated classes; those that are packed have a field `batched` of their own

MESSAGES_MAX = 64
_BYTES_MAX = 256 << 10


def pack(queue: deque[MessageT]) -> MessageT:
    """Take the first messages out of a queue, which is not empty, as one: those behind the first are in its `batched`.

    One alone is returned as it is. The messages are not changed.
    """
    first = queue.popleft()
    if not queue:
        return first
    others: list[MessageT] = []
    size_bytes = first.ByteSize()
    while queue and len(others) < MESSAGES_MAX - 1:
        size_bytes += queue[0].ByteSize()
        if size_bytes > _BYTES_MAX:
            break
        others.append(queue.popleft())
    if not others:
        return first
    packed: MessageT = type(first)(batched=others)
    packed.MergeFrom(first)
    return packed


def unpack(message: MessageT) -> Sequence[MessageT]:
    """Return the messages that `pack` has put together, in order. raises: InvalidRequest for more than MESSAGES_MAX."""
    others = getattr(message, "batched", ())
    if len(others) >= MESSAGES_MAX:
        raise InvalidRequest(f"one message may carry {MESSAGES_MAX - 1} others in `batched`, got {len(others)}")
    return (message, *others)
