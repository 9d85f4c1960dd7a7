"""Event payloads, positions and the buffer of a watcher."""

import pytest

from kvpool.core.cluster import NodeInfo, NodeKind
from kvpool.core.errors import InvalidRequest
from kvpool_index.core.events import (
    ChunkState,
    NodeState,
    Position,
    WatchBuffer,
    entry_order,
    pack_chunks,
    pack_node,
    stream_of,
    unpack_chunks,
    unpack_node,
)


def test_payloads_are_read_back() -> None:
    states = [
        ChunkState(keyspace=b"k" * 16, group_head=b"g" * 16, chunk_hash=b"c" * size, value=value, version=1 << 60)
        for size, value in ((16, b"value"), (8, b""), (8, b"x" * 1000))
    ]
    assert list(unpack_chunks(pack_chunks(states))) == states
    info = NodeInfo(node_id=b"n" * 16, kind=NodeKind.AGENT, endpoint="h:1", incarnation=1 << 50)
    for alive in (True, False):
        assert unpack_node(pack_node(NodeState(info=info, alive=alive))) == NodeState(info=info, alive=alive)


def test_events_of_a_chunk_stay_in_one_stream() -> None:
    heads = [bytes(14) + number.to_bytes(2, "little") for number in range(100)]
    assert {stream_of(head, 4) for head in heads} == {0, 1, 2, 3}
    assert stream_of(heads[0], 1) == 0


def test_positions() -> None:
    position = Position.parse("1-0,0-0,1700000000000-12")
    assert str(position.advanced(1, "5-1")) == "1-0,5-1,1700000000000-12"
    assert entry_order("10-2") > entry_order("9-11") > entry_order("9-2")
    for bad in ("x", "1-0,", "1-0;2-0", "-1-0", "1", "1-0,*", f"{1 << 64}-0", f"0-{10**20 - 1}", "\u0661-\u0660"):
        with pytest.raises(InvalidRequest):
            Position.parse(bad)


def test_a_buffer_that_would_overflow_forgets_and_says_so() -> None:
    buffer = WatchBuffer[int](3)
    assert buffer.take() == (False, [])
    buffer.put([1, 2])
    assert buffer.take() == (False, [1, 2])
    assert buffer.put([1, 2, 3]) == ()
    assert buffer.put([4]) == [1, 2, 3, 4], "what is lost is said"
    assert buffer.has_news and len(buffer) == 0
    buffer.put([5])
    assert buffer.take() == (True, [5])
    assert buffer.take() == (False, [])
    buffer.put([6])
    buffer.lose()
    assert buffer.take() == (True, [])
