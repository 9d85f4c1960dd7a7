"""What does write-back cost those who store and load pages at the same time?

One pagestore process a case, all in the same run, taking turns: without a disk tier (baseline), with write-back at its
budget, and with write-back as fast as the disk takes pages. This process does what an agent with a CPU device does: it
reserves spans, copies payloads into the arena, commits them unsealed, leases them and copies them out again. In each
turn it stores a burst of fresh pages, less than what lifts the budget, then loads them for some time, while they are
sealed and written. Before the next turn everything is flushed.

Run: python -m bench.write_back_cost [--seconds 0.3] [--rounds 30] [--budget 268435456] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from bench.waiting import ready_document
from kvpool.client.config import ClientConfig
from kvpool.client.pagestore import PageStoreSession, SessionPlan
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup, encode_keyspace, keyspace_id
from kvpool.core.page import HEADER_BYTES
from kvpool.core.payload import payload_bytes
from kvpool.core.spans import PageSpan
from kvpool.v1 import pagestore_pb2 as pb
from kvpool.v1 import pagestore_pb2_grpc as pb_grpc
from kvpool_server.process import tune_process

SPEC = KeyspaceSpec(
    model_id="bench", model_revision="1", groups=(KvGroup(32, 8, 128),), dtype=Dtype.BF16, chunk_tokens=256
)
SHARD = ShardGrid.of(SPEC).all_shards.bit_length() - 1  # one of the coarsest, largest pages
PAYLOAD_BYTES = payload_bytes(SPEC, ShardGrid.of(SPEC), SHARD)
KEYSPACE = keyspace_id(encode_keyspace("default", SPEC))
SPAN_PAGES = 16
ARENA_BYTES = 2 << 30
BURST_SPANS = 3  # 384 MiB; the budget holds up to a quarter of the arena
CASES = {"no disk": ("--disk-bytes", "0"), "budget": (), "no limit": ("--write-back-bytes-per-s", "0")}


def fresh_span() -> PageSpan:
    """The first chunks of a chain that is not stored yet."""
    hashes = secrets.token_bytes(16 * SPAN_PAGES)
    return PageSpan(
        keyspace=KEYSPACE,
        chunk_hashes=hashes,
        first_chunk_index=0,
        parent_hash=bytes(16),
        group_heads=hashes[:16],
        positions=np.arange(SPAN_PAGES, dtype=np.int32),
        shards=np.full(SPAN_PAGES, SHARD, np.uint8),
    )


@contextmanager
def pagestore(flags: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """A pagestore process: its socket and its process id."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as directory:
        ready_file = Path(directory, "ready")
        command = [sys.executable, "-m", "kvpool_pagestore.main", "--data-dir", directory, "--ready-file"]
        command += [str(ready_file), "--listen", "127.0.0.1:0", "--bulk-listen", "127.0.0.1:0"]
        command += ["--arena-bytes", str(ARENA_BYTES), "--disk-bytes", "8GiB", "--log-level", "warning"]
        # A machine that is busy with other things must not end the session.
        command += ["--heartbeat-interval-ms", "10000", *flags]
        process = subprocess.Popen(command)
        try:
            yield ready_document(process, ready_file)["socket"], process.pid
        finally:
            process.terminate()
            process.wait(60)


@dataclass(slots=True)
class Case:
    """One pagestore, its session and what it was seen to do."""

    socket: str
    pid: int
    session: PageStoreSession
    put_rates: list[float] = field(default_factory=list)  # GB/s, one a round
    get_rates: list[float] = field(default_factory=list)
    disk_rates: list[float] = field(default_factory=list)  # what was written meanwhile
    refused_pages: int = 0

    async def turn(self, seconds: float, buffer: memoryview, *, counts: bool) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        spans = [fresh_span() for _ in range(BURST_SPANS)]
        moved_bytes, began_s, written_bytes = 0, time.perf_counter(), self._written_bytes()
        turn_began_s = began_s
        for span in spans:
            granted = (await self.session.reserve_span(span)).granted
            await asyncio.to_thread(_copy, self.session.addresses(granted), address, True)
            assert await self.session.commit(granted.lease_ids, sealed=False) == []
            moved_bytes += granted.count * PAYLOAD_BYTES
            self.refused_pages += SPAN_PAGES - granted.count
        put_rate = moved_bytes / (time.perf_counter() - began_s) / 1e9
        moved_bytes, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            async with self.session.acquire_span(random.choice(spans), wait_s=30) as answers:
                async for answer in answers:
                    await asyncio.to_thread(_copy, self.session.addresses(answer.granted), address, False)
                    moved_bytes += answer.granted.count * PAYLOAD_BYTES
                    self.session.release_soon(answer.granted.lease_ids)
        if counts:
            disk_bytes = self._written_bytes() - written_bytes
            self.disk_rates.append(disk_bytes / (time.perf_counter() - turn_began_s) / 1e9)
            self.put_rates.append(put_rate)
            self.get_rates.append(moved_bytes / (time.perf_counter() - began_s) / 1e9)
        await asyncio.to_thread(self._flush)

    def _written_bytes(self) -> int:
        """What the process had the kernel write to disks."""
        lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("write_bytes")))

    def _flush(self) -> None:
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            pb_grpc.PageStoreServiceStub(channel).Flush(pb.FlushRequest(), timeout=120)


def _copy(addresses: np.ndarray[tuple[int], np.dtype[np.int64]], buffer: int, into_arena: bool) -> None:
    for number, page in enumerate(addresses.tolist()):
        payload, ours = page + HEADER_BYTES, buffer + number * PAYLOAD_BYTES
        ctypes.memmove(*((payload, ours) if into_arena else (ours, payload)), PAYLOAD_BYTES)


async def measure(stores: dict[str, tuple[str, int]], seconds: float, rounds: int) -> dict[str, Case]:
    config = ClientConfig(index_endpoints=("127.0.0.1:1",))  # never asked
    cases = {}
    for name, (socket, pid) in stores.items():
        plan = SessionPlan(
            endpoint=f"unix:{socket}", peer_name="bench", keyspaces=((KEYSPACE, SPEC),), trusts_arena=True
        )
        cases[name] = Case(socket, pid, await PageStoreSession.open(plan, config))
        await cases[name].session.prepare(0)
    buffer = memoryview(bytearray(np.random.default_rng(1).bytes(SPAN_PAGES * PAYLOAD_BYTES)))
    for round_number in range(rounds + 1):  # the first one touches fresh memory
        for case in random.sample(list(cases.values()), len(cases)):
            await case.turn(seconds, buffer, counts=bool(round_number))
    for case in cases.values():
        await case.session.close()
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="of loads in a turn")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget", type=int, default=0, help="bytes per second; 0: the pagestore's default")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tune_process()
    flags = dict(CASES)
    if arguments.budget:
        flags["budget"] = ("--write-back-bytes-per-s", str(arguments.budget))
    with (
        pagestore(flags["no disk"]) as none,
        pagestore(flags["budget"]) as budget,
        pagestore(flags["no limit"]) as all_,
    ):
        stores = {"no disk": none, "budget": budget, "no limit": all_}
        cases = asyncio.run(measure(stores, arguments.seconds, arguments.rounds))
    found = {}
    for what in ("put", "get"):
        rates = {name: case.put_rates if what == "put" else case.get_rates for name, case in cases.items()}
        baseline = statistics.median(rates["no disk"])
        for name, each in rates.items():
            # Of the same round each: what else runs on the machine changes from round to round.
            ratio = statistics.median(one / other for one, other in zip(each, rates["no disk"], strict=True))
            value = statistics.median(each)
            found[f"{what}, {name}"] = {"value": value, "unit": "GB/s", "baseline": baseline, "ratio": ratio}
            case = cases[name]
            disk_rate = statistics.median(case.disk_rates)
            refused = f"; {disk_rate:.2f} GB/s to disk, {case.refused_pages} pages refused" if what == "put" else ""
            print(f"{what}, {name:10} {value:6.2f} GB/s ({min(each):.2f} to {max(each):.2f})  {ratio:.2f}{refused}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"about": vars(arguments) | {"json": ""}, "cases": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
