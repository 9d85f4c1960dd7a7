"""Bad pages sent to a real pagestore with plain generated stubs: each is refused by its own item, nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from kvpool.core.elements import Codec
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool.core.page import seal
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.v1 import pagestore_pb2_grpc as pb_grpc
from kvpool.wire.convert_keyspace import session_keyspaces_to_proto
from kvpool.wire.convert_pages import page_metadata_to_proto
from tests.fixtures.pagestore import (
    GRID,
    KEYSPACES,
    PAYLOAD_BYTES,
    SLOT_BYTES,
    SPEC,
    Running,
    metadata,
    new_world,
    page_key,
    sealed_page,
)
from tests.fixtures.pagestore_server import served

GOOD = page_key(100)


def frame(index: int, page: bytes, *, key: bytes = b"", page_bytes: int = 0) -> pb.PageFrame:
    """A page in one frame, under its own key and length unless a field says otherwise."""
    return pb.PageFrame(
        item_index=index,
        key=key or page_key(index).pack(),
        page_bytes=page_bytes or len(page),
        metadata=page_metadata_to_proto(metadata(index)),
        data=page,
    )


def of_codec(number: int, codec: int) -> bytes:
    page = bytearray(sealed_page(page_key(number)))
    seal(page, page_key(number), codec, PAYLOAD_BYTES)
    return bytes(page)


def of_shard(number: int, shard: int) -> bytes:
    page = bytearray(sealed_page(page_key(number)))
    seal(page, page_key(number, shard), SPEC.codec, PAYLOAD_BYTES)
    return bytes(page)


def damaged(number: int, at: int) -> bytes:
    page = bytearray(sealed_page(page_key(number)))
    page[at] ^= 1
    return bytes(page)


def cases() -> list[tuple[pb.PageFrame, str]]:
    """Frames of pages 0, 1, ... and why each is refused; the last one is good."""
    theirs = keyspace_id(encode_keyspace("another tenant", SPEC))
    whole = sealed_page(page_key(0))
    outside = GRID.shard_count
    return [
        (frame(0, whole[:-8]), "INVALID_REQUEST"),
        (frame(1, whole + bytes(8)), "INVALID_REQUEST"),
        (frame(2, of_codec(2, 99)), "INVALID_REQUEST"),
        (frame(3, of_codec(3, Codec.INT8_GROUP8)), "INVALID_REQUEST"),
        (frame(4, sealed_page(page_key(4)), key=page_key(4).pack()[:-1]), "INVALID_REQUEST"),
        (frame(5, of_shard(5, outside), key=page_key(5, outside).pack()), "INVALID_REQUEST"),
        (frame(6, sealed_page(page_key(6)), key=page_key(6, keyspace=theirs).pack()), "KEYSPACE_UNKNOWN"),
        (frame(7, damaged(7, 70)), "PAGE_CORRUPT"),
        (frame(8, damaged(8, 5)), "PAGE_CORRUPT"),  # its codec, which is no other codec for that
        (frame(9, sealed_page(page_key(1))), "PAGE_CORRUPT"),
        (frame(10, sealed_page(GOOD), key=GOOD.pack()), ""),
    ]


def nothing_but_the_good_page(running: Running) -> None:
    gauges = running.engine.gauges()
    assert (gauges.staging_pages, gauges.arena_used_bytes, gauges.leases) == (1, SLOT_BYTES, 0)


async def test_every_bad_page_is_refused_by_its_item_and_never_visible() -> None:
    with new_world(disk=False) as world:
        async with served(world) as store, grpc.aio.insecure_channel(store.node.bulk_endpoint) as channel:
            stub: pb_grpc.PageTransferServiceAsyncStub = pb_grpc.PageTransferServiceStub(channel)
            keyspaces = session_keyspaces_to_proto(KEYSPACES)

            def requests() -> Iterator[pb.WritePagesRequest]:
                yield pb.WritePagesRequest(open=pb.WritePagesOpen(keyspaces=keyspaces))
                for one, _ in cases():
                    yield pb.WritePagesRequest(frame=one)

            answers = [answer async for answer in stub.WritePages(requests(), timeout=60)]
            assert [(one.item_index, one.error.reason) for one in answers] == [
                (index, reason) for index, (_, reason) in enumerate(cases())
            ]
            nothing_but_the_good_page(store.running)
            assert store.running.metric("verification_failures_total", place="commit") == 3

            keys = [page_key(index).pack() for index in range(10)] + [GOOD.pack()]
            request = pb.ReadPagesRequest(keyspaces=keyspaces, keys=keys)
            frames = [one async for one in stub.ReadPages(request, timeout=60)]
            assert [one.outcome for one in frames] == [pb.OUTCOME_MISS] * 10 + [pb.OUTCOME_HIT]
            assert frames[-1].data == sealed_page(GOOD)
