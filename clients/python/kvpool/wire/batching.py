"""Several messages of a stream in one gRPC message, which costs less than a gRPC message for each.

The classes are generated ones; those that are batched have a field `batched` of their own class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from kvpool.core.errors import InvalidRequest

MessageT = TypeVar("MessageT", bound=Any)

# What a message costs beside its bytes is spread over so many already; a receiver serves them without a pause.
MESSAGES_MAX = 64
_BYTES_MAX = 64 << 10  # far below what any peer takes in one gRPC message


def batch(queue: deque[MessageT]) -> MessageT:
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
    batched: MessageT = type(first)(batched=others)
    batched.MergeFrom(first)
    return batched


def unbatch(message: MessageT) -> Sequence[MessageT]:
    """Return the messages that `batch` has put together, in order; `message` is not used any more.

    raises: InvalidRequest for more than MESSAGES_MAX, and for a batch in a batch.
    """
    others = getattr(message, "batched", ())
    if not others:
        return (message,)
    if len(others) >= MESSAGES_MAX:
        raise InvalidRequest(f"`batched` may have {MESSAGES_MAX - 1} messages, got {len(others)}")
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
