"""Messages of a stream that are sent as one gRPC message."""

from __future__ import annotations

from collections import deque

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.v1 import gpuagent_pb2, pagestore_pb2
from kvpool.wire.convert import BATCH_MESSAGES_MAX, batch, unbatch

Request = gpuagent_pb2.EngineRequest


def stores(count: int, size_bytes: int = 16) -> deque[Request]:
    store = gpuagent_pb2.EngineStoreRequest(chunk_hashes=bytes(size_bytes))
    return deque(Request(request_id=number + 1, store=store) for number in range(count))


def ids(message: Request) -> list[int]:
    sent = Request.FromString(message.SerializeToString())
    return [one.request_id for one in unbatch(sent)]


def test_messages_come_out_as_they_went_in_and_in_order() -> None:
    queue = stores(3)
    kept = list(queue)
    batched = batch(queue)
    assert not queue
    parts = unbatch(Request.FromString(batched.SerializeToString()))
    assert [one.WhichOneof("kind") for one in parts] == ["store"] * 3
    assert ids(batched) == [1, 2, 3]
    assert [len(one.batched) for one in kept] == [0, 0, 0]  # a heartbeat is sent again and again


def test_a_message_alone_is_sent_as_it_is() -> None:
    queue = stores(1)
    only = queue[0]
    assert batch(queue) is only


def test_one_message_stays_within_bounds() -> None:
    queue = stores(BATCH_MESSAGES_MAX + 5)
    assert ids(batch(queue)) == list(range(1, BATCH_MESSAGES_MAX + 1))
    assert len(queue) == 5
    large = stores(4, size_bytes=25 << 10)
    assert ids(batch(large)) == [1, 2]
    assert ids(batch(large)) == [3, 4]
    assert ids(batch(stores(2, size_bytes=1 << 20))) == [1]  # one that is too large itself goes alone


def test_messages_of_classes_without_the_field_are_read_as_they_are() -> None:
    queue = [pagestore_pb2.SessionRequest(request_id=1)]
    assert unbatch(queue[0]) == (queue[0],)


def test_more_than_a_peer_may_send_at_once_is_refused() -> None:
    message = Request(request_id=1, batched=stores(BATCH_MESSAGES_MAX))
    with pytest.raises(InvalidRequest, match="may have 63 messages"):
        unbatch(message)
    message.batched.pop()
    assert len(unbatch(message)) == BATCH_MESSAGES_MAX


def test_a_batch_in_a_batch_is_refused() -> None:
    nested = Request(request_id=1, batched=[Request(request_id=2, batched=stores(1))])
    with pytest.raises(InvalidRequest, match="must have none themselves"):
        unbatch(nested)


def test_no_part_keeps_the_whole_message() -> None:
    first, second = unbatch(batch(stores(2)))
    assert not first.batched and not second.batched
    assert first.SerializeToString() == stores(1)[0].SerializeToString()
