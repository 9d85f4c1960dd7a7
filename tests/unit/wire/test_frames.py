"""The bulk codec is protobuf: what it writes stock protobuf reads, and the other way round, and nothing crashes it."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core.errors import InvalidRequest
from kvpool.core.page import page_bytes
from kvpool.v1 import common_pb2, pagestore_pb2
from kvpool.wire import frames
from kvpool.wire.frames import (
    DEFAULT_FRAME_BYTES,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    MIN_FRAME_BYTES,
    BulkFrame,
    page_pieces,
)

int64s = st.integers(-(1 << 63), (1 << 63) - 1)
metadata_messages = st.builds(
    common_pb2.PageMetadata,
    parent_hash=st.binary(max_size=16),
    chunk_index=int64s,
    group_head_hash=st.binary(max_size=16),
    retention=st.none() | st.builds(common_pb2.Retention, ttl_ms=int64s, priority=st.integers(-100, 100)),
)
heads = st.builds(
    pagestore_pb2.PageFrame,
    item_index=int64s,
    outcome=st.integers(0, 5),
    page_bytes=int64s,
    offset=int64s,
    error=st.none() | st.builds(common_pb2.ItemError, reason=st.text(max_size=9), message=st.text(max_size=200)),
    key=st.binary(max_size=40),
    metadata=st.none() | metadata_messages,
)
pieces = st.binary(max_size=40) | st.sampled_from([b"\x7a" * 127, b"\x00" * 128, b"\xff" * 20_000])


def stock_frame(head: pagestore_pb2.PageFrame, data: bytes) -> pagestore_pb2.PageFrame:
    frame = pagestore_pb2.PageFrame()
    frame.CopyFrom(head)
    frame.data = data
    return frame


def whole(frame: BulkFrame) -> pagestore_pb2.PageFrame:
    return stock_frame(frame.head, bytes(frame.data))


@given(heads, pieces)
def test_a_frame_has_the_stock_bytes_both_ways(head: pagestore_pb2.PageFrame, data: bytes) -> None:
    stock = stock_frame(head, data)
    encoded = frames.encode_page_frame(BulkFrame(head, memoryview(data)))
    assert encoded == stock.SerializeToString()
    decoded = frames.decode_page_frame(encoded)
    assert decoded.head == head
    assert bytes(decoded.data) == data


@given(heads, pieces)
def test_a_written_frame_has_the_stock_bytes_both_ways(head: pagestore_pb2.PageFrame, data: bytes) -> None:
    stock = pagestore_pb2.WritePagesRequest(frame=stock_frame(head, data))
    encoded = frames.encode_write_request(BulkFrame(head, memoryview(data)))
    assert encoded == stock.SerializeToString()
    decoded = frames.decode_write_request(encoded)
    assert isinstance(decoded, BulkFrame)
    assert whole(decoded) == stock.frame


@given(st.integers(0, (1 << 64) - 1), st.lists(st.binary(max_size=16), max_size=3))
def test_an_open_has_the_stock_bytes_both_ways(incarnation: int, ids: list[bytes]) -> None:
    keyspaces = [pagestore_pb2.SessionKeyspace(keyspace_id=keyspace_id) for keyspace_id in ids]
    opening = pagestore_pb2.WritePagesOpen(expected_incarnation=incarnation, keyspaces=keyspaces)
    encoded = frames.encode_write_request(opening)
    assert encoded == pagestore_pb2.WritePagesRequest(open=opening).SerializeToString()
    assert frames.decode_write_request(encoded) == opening


def test_the_piece_is_viewed_not_copied() -> None:
    message = frames.encode_page_frame(BulkFrame(pagestore_pb2.PageFrame(item_index=3), b"piece"))
    data = frames.decode_page_frame(message).data
    assert isinstance(data, memoryview)
    assert data.obj is message
    request = frames.encode_write_request(BulkFrame(pagestore_pb2.PageFrame(item_index=3), b"piece"))
    written = frames.decode_write_request(request)
    assert isinstance(written, BulkFrame) and isinstance(written.data, memoryview)
    assert written.data.obj is request


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


# Bytes that look like frames: real fields, in any order and number, cut off, with noise between.
varints = st.integers(0, (1 << 70) - 1).map(_varint)
fields = st.one_of(
    st.tuples(st.integers(0, 17), varints).map(lambda field: _varint(field[0] << 3) + field[1]),
    st.tuples(st.integers(0, 17), st.binary(max_size=24)).map(
        lambda field: _varint(field[0] << 3 | 2) + _varint(len(field[1])) + field[1]
    ),
    st.binary(max_size=6),
    st.sampled_from([b"\x7a\x00", b"\xfa\x00\x03abc", b"\x7b\x7c", b"\x79" + b"8" * 8, b"\x7d" + b"4" * 4]),
    st.sampled_from([b"\xfa\x80\x80\x80\x10\x01z", b"\x7a" + b"\xff" * 9 + b"\x01", b"\x2a\x04\x0a\x02\xff\xfe"]),
)
hostile = st.lists(fields, max_size=6).map(b"".join)


def parsed(message_type: Any, encoded: bytes) -> Any:
    try:
        message = message_type.FromString(encoded)
    except DecodeError:
        return None
    message.DiscardUnknownFields()
    return message


@settings(max_examples=400)
@given(hostile)
def test_hostile_frames_are_read_as_stock_reads_them_or_refused(encoded: bytes) -> None:
    expected = parsed(pagestore_pb2.PageFrame, encoded)
    if expected is None:
        with pytest.raises(InvalidRequest):
            frames.decode_page_frame(encoded)
        return
    found = whole(frames.decode_page_frame(encoded))
    found.DiscardUnknownFields()
    assert found == expected


@given(hostile | hostile.map(lambda inner: b"\x7a" + _varint(len(inner)) + inner))
def test_hostile_requests_are_read_as_stock_reads_them_or_refused(encoded: bytes) -> None:
    expected = parsed(pagestore_pb2.WritePagesRequest, encoded)
    if expected is None or expected.WhichOneof("kind") is None:
        with pytest.raises(InvalidRequest):
            frames.decode_write_request(encoded)
        return
    found = frames.decode_write_request(encoded)
    if isinstance(found, BulkFrame):
        frame = whole(found)
        frame.DiscardUnknownFields()
        assert expected.WhichOneof("kind") == "frame" and frame == expected.frame
    else:
        found.DiscardUnknownFields()
        assert found == expected.open


@given(heads, pieces, st.data())
def test_a_frame_cut_off_anywhere_is_refused_or_what_stock_makes_of_it(
    head: pagestore_pb2.PageFrame, data: bytes, draw: st.DataObject
) -> None:
    encoded = frames.encode_page_frame(BulkFrame(head, data))
    cut = encoded[: draw.draw(st.integers(0, len(encoded)))]
    expected = parsed(pagestore_pb2.PageFrame, cut)
    if expected is None:
        with pytest.raises(InvalidRequest):
            frames.decode_page_frame(cut)
    else:
        assert whole(frames.decode_page_frame(cut)) == expected


@pytest.mark.parametrize("frame_bytes", [MIN_FRAME_BYTES, DEFAULT_FRAME_BYTES, MAX_FRAME_BYTES])
@pytest.mark.parametrize("size_bytes", [1, MIN_FRAME_BYTES, (2 << 20) + 192, (5 << 20) - 1, (8 << 20) + 65_000])
def test_pieces_cover_a_page_and_fit_into_messages(size_bytes: int, frame_bytes: int) -> None:
    pieces = list(page_pieces(size_bytes, frame_bytes))
    assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == size_bytes
    assert all(end - begin == frame_bytes for begin, end in pieces[:-1])
    assert 0 < pieces[-1][1] - pieces[-1][0] <= frame_bytes + (32 << 10) < MAX_MESSAGE_BYTES


def test_header_and_sums_are_no_piece_of_their_own() -> None:
    assert len(list(page_pieces(page_bytes(2 << 20), DEFAULT_FRAME_BYTES))) == 2
