"""How close does a stream of pages come to a bare gRPC stream?

Two processes on loopback. Each way sends the same bytes out of an arena larger than the caches, in frames of the same
size, and copies them into a buffer on the other side; the ways take turns, so that a busy machine slows all alike.

bare      a gRPC stream of fresh `bytes`, no serializer, one copy into the buffer
servicer  PageTransferService with our codec over pages in memory, read by PageTransferClient
stock     the same with protobuf's own serializers on both sides
sums      as servicer, and every page verified after it arrived
pagestore a whole pagestore process, its engine on its event loop; pages in its arena, written by write_pages

Run: python -m bench.pages_stream [--frame-mib 1] [--pages 256] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import numpy as np

from bench.waiting import ready_document
from kvpool.client import transfer
from kvpool.client.transfer import PageToRead, PageToWrite, PageTransferClient
from kvpool.core.cluster import PageMetadata
from kvpool.core.errors import KvPoolError
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup, encode_keyspace, keyspace_id
from kvpool.core.outcome import Admission
from kvpool.core.page import HEADER_BYTES, PageKey, page_bytes, seal, slot_bytes, verify
from kvpool.core.payload import payload_bytes
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.wire.frames import MAX_MESSAGE_BYTES, BulkFrame, page_pieces
from kvpool_pagestore.bulk.ports import ReadGrant
from kvpool_pagestore.bulk.servicer import PageTransferServicer
from kvpool_server.listen import TcpAddress
from kvpool_server.process import tune_process
from kvpool_server.server import BulkServer

MIB = 1 << 20
SPEC = KeyspaceSpec(
    model_id="bench", model_revision="1", groups=(KvGroup(32, 8, 128),), dtype=Dtype.BF16, chunk_tokens=256
)
GRID = ShardGrid.of(SPEC)
PAYLOAD_BYTES = 2 * MIB
SHARDS = [shard for shard in range(GRID.shard_count) if payload_bytes(SPEC, GRID, shard) == PAYLOAD_BYTES]  # of TP 4
KEYSPACE = keyspace_id(encode_keyspace("default", SPEC))
METADATA = PageMetadata(parent_hash=bytes(16), chunk_index=0, group_head_hash=bytes(16))
BARE = "/bench.Bare/Read"


def key(number: int) -> PageKey:
    chunk, position = divmod(number, len(SHARDS))
    return PageKey(KEYSPACE, chunk.to_bytes(16, "big"), SHARDS[position])


def number_of(page_key: PageKey) -> int:
    return int.from_bytes(page_key.chunk_hash, "big") * len(SHARDS) + SHARDS.index(page_key.shard)


def make_page(number: int, buffer: memoryview) -> None:
    """Fill `buffer` with a page that verifies."""
    payload = np.frombuffer(buffer[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES], dtype=np.uint64)
    payload[:] = np.arange(payload.size, dtype=np.uint64) * np.uint64(number + 1)
    seal(buffer, key(number), SPEC.codec, PAYLOAD_BYTES)


class BenchArena:
    """Pages in memory, and the gateway to them: all are always there."""

    def __init__(self, page_count: int) -> None:
        stride = slot_bytes(PAYLOAD_BYTES)
        memory = memoryview(bytearray(stride * page_count))
        self.pages = [memory[stride * n : stride * n + page_bytes(PAYLOAD_BYTES)] for n in range(page_count)]
        for number, page in enumerate(self.pages):
            make_page(number, page)

    def open_bulk(
        self,
        tenant: str,
        keyspaces: Sequence[tuple[bytes, KeyspaceSpec]],
        expected_incarnation: int,
        *,
        require_durable: bool = False,
    ) -> Any:
        return self

    def acquire(self, keys: Sequence[PageKey], timeout_s: float) -> Future[Sequence[ReadGrant | KvPoolError | None]]:
        acquired: Future[Sequence[ReadGrant | KvPoolError | None]] = Future()
        pages = [self.pages[number_of(page_key)] for page_key in keys]
        acquired.set_result([ReadGrant(lease_id=1, page=memoryview(page), metadata=METADATA) for page in pages])
        return acquired

    def release(self, grants: Sequence[ReadGrant]) -> None:
        """Nothing is leased."""

    def close(self) -> None:
        """Nothing is leased."""


def serve(pipe: Connection, page_count: int) -> None:
    """The serving process of all ways but the last two."""
    tune_process()
    arena = BenchArena(page_count)
    server = BulkServer(threads=4, interceptors=[])
    servicer = PageTransferServicer(arena, lambda: "default")
    servicer.add_to(server.grpc)

    def bare(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        frame_bytes = int(request)
        for page in arena.pages:
            for begin, end in page_pieces(len(page), frame_bytes):
                yield bytes(page[begin:end])

    def stock(frame: BulkFrame) -> bytes:
        message = pb.PageFrame()
        message.CopyFrom(frame.head)
        message.data = bytes(frame.data)
        return message.SerializeToString()

    handlers: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {
        "bench.Bare": {"Read": grpc.unary_stream_rpc_method_handler(bare)},
        "bench.Stock": {
            "ReadPages": grpc.unary_stream_rpc_method_handler(servicer.ReadPages, pb.ReadPagesRequest.FromString, stock)
        },
    }
    server.grpc.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(service, methods) for service, methods in handlers.items()]
    )
    port = server.listen_tcp(TcpAddress("127.0.0.1", 0))
    server.start()
    pipe.send(f"127.0.0.1:{port}")
    pipe.recv()
    server.stop(0.0)


@contextmanager
def serving(page_count: int) -> Iterator[str]:
    """The endpoint of a process that runs `serve`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, page_count))
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send("stop")
        process.join(10)


@contextmanager
def pagestore(page_count: int) -> Iterator[str]:
    """The bulk endpoint of a whole pagestore without a disk tier and without an index."""
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready.json"
        arena_bytes = page_count * slot_bytes(PAYLOAD_BYTES) * 3
        command = [sys.executable, "-m", "kvpool_pagestore.main", "--data-dir", directory, "--ready-file", str(ready)]
        command += ["--listen", "127.0.0.1:0", "--bulk-listen", "127.0.0.1:0", "--disk-bytes", "0"]
        command += ["--arena-bytes", str(arena_bytes), "--log-level", "warning"]
        with subprocess.Popen(command) as process:
            try:
                yield ready_document(process, ready)["bulk_endpoint"]
            finally:
                process.terminate()


class Peer:
    """The process at the other end: buffers for all pages, and one function a way that fills or sends them."""

    def __init__(self, endpoint: str, pagestore_endpoint: str, page_count: int, frame_bytes: int) -> None:
        self._buffers = [bytearray(page_bytes(PAYLOAD_BYTES)) for _ in range(page_count)]
        self._frame_bytes = frame_bytes
        self._client = PageTransferClient(endpoint, frame_bytes=frame_bytes)
        self._pagestore = PageTransferClient(pagestore_endpoint, frame_bytes=frame_bytes)
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        self._channel = grpc.insecure_channel(endpoint, options=options)

    def bare(self) -> None:
        method: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(BARE)
        call = method(b"%d" % self._frame_bytes, timeout=60)
        for buffer in self._buffers:
            view, offset = memoryview(buffer), 0
            while offset < len(buffer):
                frame = next(call)
                view[offset : offset + len(frame)] = frame
                offset += len(frame)
        assert next(call, None) is None

    def servicer(self) -> None:
        self._read(self._client)

    def stock(self) -> None:
        def decode(message: bytes) -> BulkFrame:
            frame = pb.PageFrame.FromString(message)
            return BulkFrame(frame, frame.data)

        with (
            mock.patch.object(transfer, "_READ_PAGES", "/bench.Stock/ReadPages"),
            mock.patch.object(transfer, "decode_page_frame", decode),
        ):
            self._read(self._client)

    def sums(self) -> None:
        self._read(self._client)
        for number, buffer in enumerate(self._buffers):
            assert verify(buffer, key(number)) is None

    def pagestore(self) -> None:
        self._read(self._pagestore)

    def write(self) -> None:
        items = [
            PageToWrite(key=key(number), page=memoryview(buffer), metadata=METADATA)
            for number, buffer in enumerate(self._buffers)
        ]
        answers: list[Admission | KvPoolError] = []
        self._pagestore.write_pages(
            [(KEYSPACE, SPEC)], items, lambda index, admission, error: answers.append(error or admission), timeout_s=60
        )
        assert answers == [Admission.RESERVED] * len(items), answers[:3]

    def fill(self) -> None:
        """Make the pages here and bring them to the pagestore."""
        for number, buffer in enumerate(self._buffers):
            make_page(number, memoryview(buffer))
        self.write()

    def total_bytes(self) -> int:
        return sum(len(buffer) for buffer in self._buffers)

    def _read(self, client: PageTransferClient) -> None:
        items = [PageToRead(key=key(n), destination=memoryview(buffer)) for n, buffer in enumerate(self._buffers)]
        hits: list[bool] = []
        client.read_pages([(KEYSPACE, SPEC)], items, lambda index, error, hit: hits.append(hit), timeout_s=60)
        assert hits == [True] * len(items)


def measure(page_count: int, frame_bytes: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of each way in each round."""
    with serving(page_count) as endpoint, pagestore(page_count) as pagestore_endpoint:
        peer = Peer(endpoint, pagestore_endpoint, page_count, frame_bytes)
        peer.fill()
        ways = {way.__name__: way for way in (peer.bare, peer.servicer, peer.stock, peer.sums, peer.pagestore)}
        found: dict[str, list[float]] = {name: [] for name in ways}
        for round_number in range(rounds + 1):
            for name, run in random.sample(list(ways.items()), len(ways)):
                started_at_s = time.perf_counter()
                run()
                rate = peer.total_bytes() / (time.perf_counter() - started_at_s) / 1e9
                if round_number:  # the first one touches fresh memory
                    found[name].append(rate)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frame-mib", type=float, default=1)
    parser.add_argument("--pages", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tune_process()
    found = measure(arguments.pages, int(arguments.frame_mib * MIB), arguments.rounds)
    baseline = statistics.median(found["bare"])
    cases = {}
    for name, rates in found.items():
        value = statistics.median(rates)
        ratio = value / baseline
        cases[f"page stream: {name}"] = {"value": value, "unit": "GB/s", "baseline": baseline, "ratio": ratio}
        print(f"{name:10} {value:6.2f} GB/s  ({min(rates):.2f} to {max(rates):.2f})  {ratio:.2f} of bare")
    if arguments.json:
        arguments.json.write_text(json.dumps(cases, indent=2) + "\n")


if __name__ == "__main__":
    main()
