"""`python -m bench replay-live`: a trace as an engine would play it, with real pages, at a running cluster."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.request_trace import read_trace
from bench.rig.cluster import endpoint_of, running_cluster
from bench.rig.results import write_result
from kvpool.client.config import ClientConfig
from kvpool.client.engine_items import StoreResult
from kvpool.client.engine_registration import EngineRegistration
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.client.sync import Pool
from kvpool.core.byte_sizes import size_from_text
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool_cli.errors import CommandFailed
from kvpool_cli.output import say
from kvpool_cli.state import DEFAULT_STATE_DIR, ClusterState
from tests.fixtures.layout_presets import contiguous_layout

KEYSPACE_NAME = "kvpool-replay"
_CHUNK_TOKENS = 16
_HEAD_DIM = 64
_PLANE_BYTES = _CHUNK_TOKENS * _HEAD_DIM * 2  # of one chunk: keys or values of one layer, one head, bf16
_TIMEOUT_S = 60.0
_REQUESTS = 500  # unless --limit says otherwise: each one moves real bytes
_BLOCK_BYTES = 64 << 10
_SHOWN_REQUESTS = 500  # between two remarks on how far it is


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("trace", metavar="TRACE", help="JSON lines with hash_ids; - is stdin")
    parser.add_argument("--state-dir", type=Path, default=DEFAULT_STATE_DIR, help="of the cluster")
    parser.add_argument("--block-bytes", type=size_from_text, default=_BLOCK_BYTES, help="of one block")
    parser.add_argument("--limit", type=int, default=_REQUESTS, help=f"only the first requests (default {_REQUESTS})")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout")


def run(arguments: argparse.Namespace) -> int:
    """Replay and print. Raises CommandFailed, also for bytes that are not what was stored."""
    trace = read_trace(arguments.trace, arguments.limit)
    with running_cluster(arguments.state_dir) as (state, _):
        counts, block_bytes = replay_live(state, trace.requests, arguments.block_bytes)
    document = counts.to_document(block_bytes)
    text = (
        f"prefix hit rate {document['hit_rate']:.4f} ({counts.hits} of {counts.block_references} blocks"
        f" of {counts.requests} requests), {counts.bytes_verified} bytes verified, {counts.stored_blocks} blocks stored"
    )
    write_result(document, arguments.json, text)
    if counts.wrong_blocks:
        raise CommandFailed(f"{counts.wrong_blocks} blocks came back with other bytes than were stored; keep the logs")
    return 0


@dataclass(slots=True)
class LiveCounts:
    """What a live replay counted."""

    requests: int = 0
    block_references: int = 0
    hits: int = 0
    bytes_verified: int = 0
    wrong_blocks: int = 0
    stored_blocks: int = 0
    failed_blocks: int = 0
    elapsed_s: float = 0.0

    def to_document(self, block_bytes: int) -> dict[str, Any]:
        """The document of `--json`."""
        return {
            "live": True,
            "hit_rate": self.hits / self.block_references if self.block_references else 0.0,
            "hits": self.hits,
            "requests": self.requests,
            "block_references": self.block_references,
            "block_bytes": block_bytes,
            "bytes_verified": self.bytes_verified,
            "wrong_blocks": self.wrong_blocks,
            "stored_blocks": self.stored_blocks,
            "failed_blocks": self.failed_blocks,
            "elapsed_s": self.elapsed_s,
            "references_per_s": self.block_references / max(self.elapsed_s, 1e-9),
        }


class LiveEngine:
    """An engine rank whose KV of a block is made of the block's number, so that every byte that comes back is known."""

    def __init__(self, state: ClusterState, block_bytes: int, longest: int) -> None:
        """Register with the cluster's first agent. Raises CommandFailed, KvPoolError.

        block_bytes: about; rounded to whole layers. longest: blocks of the longest request.
        """
        self._layers = max(1, round(block_bytes / (2 * _PLANE_BYTES)))
        self._block_count = longest
        self.block_bytes = 2 * self._layers * _PLANE_BYTES
        spec = KeyspaceSpec(
            model_id="kvpool-replay",
            model_revision=str(self._layers),
            groups=(KvGroup(self._layers, 1, _HEAD_DIM),),
            dtype=Dtype.BF16,
            chunk_tokens=_CHUNK_TOKENS,
        )
        layout = contiguous_layout(spec, range(self._layers), range(1), _CHUNK_TOKENS, longest)
        self._region = SharedMemoryRegion(layout.handle_sizes[0])
        plan = EngineRegistration(
            endpoint=f"unix:{endpoint_of(state, 'agent', 'socket')}",
            engine_name="replay",
            keyspace_name=f"{KEYSPACE_NAME}-{self._layers}",
            spec=spec,
            layout=layout,
            regions=(self._region,),
        )
        self._pool = Pool(
            plan, ClientConfig(connect_timeout_s=_TIMEOUT_S, store_timeout_s=_TIMEOUT_S, load_timeout_s=_TIMEOUT_S)
        )

    def close(self) -> None:
        """End the session."""
        self._pool.close()
        self._region.close()

    def request(self, blocks: Sequence[int], counts: LiveCounts) -> None:
        """Load what the cluster has of a prompt's prefix and verify it; "compute" the rest and store it."""
        chain = self._pool.prompt([token for block in blocks for token in _tokens(block)])
        table = list(range(len(blocks)))
        self._region.buffer[:] = bytes(self._region.size_bytes)  # nothing of an earlier request may look loaded
        # No match before: what the request before this one stored is announced to the index only a little later.
        report = self._pool.load(chain, table, first_chunk=0, end_chunk=len(blocks), timeout_s=_TIMEOUT_S)
        loaded = report.loaded_chunks
        for position in range(loaded):
            if self._holds(position, blocks[position]):
                counts.bytes_verified += self.block_bytes
            else:
                counts.wrong_blocks += 1
        for position in range(loaded, len(blocks)):
            self._fill(position, blocks[position])
        counts.requests += 1
        counts.block_references += len(blocks)
        counts.hits += loaded
        if loaded < len(blocks):
            handle = self._pool.store(chain, table, first_chunk=loaded, end_chunk=len(blocks))
            self._count_stored(handle.result(_TIMEOUT_S), counts)

    # Inside

    def _count_stored(self, report: StoreResult, counts: LiveCounts) -> None:
        counts.stored_blocks += report.stored_chunks
        counts.failed_blocks += len(report.failed_chunks)

    def _places(self, position: int) -> list[slice]:
        """Where a block of the cache lies: planes of [blocks, bytes of a block]."""
        step = self._block_count * _PLANE_BYTES
        begin = position * _PLANE_BYTES
        return [slice(at * step + begin, at * step + begin + _PLANE_BYTES) for at in range(2 * self._layers)]

    def _fill(self, position: int, block: int) -> None:
        for plane, place in enumerate(self._places(position)):
            self._region.buffer[place] = _content(block, plane)

    def _holds(self, position: int, block: int) -> bool:
        return all(
            self._region.buffer[place] == _content(block, plane) for plane, place in enumerate(self._places(position))
        )


def replay_live(state: ClusterState, requests: Sequence[Sequence[int]], block_bytes: int) -> tuple[LiveCounts, int]:
    """Play all requests, one after another; what was counted, and the true bytes of a block. Raises CommandFailed."""
    counts = LiveCounts()
    engine = LiveEngine(state, block_bytes, max(1, *map(len, requests)))
    began_s = time.perf_counter()
    try:
        for blocks in requests:
            if blocks:
                engine.request(blocks, counts)
            if counts.requests % _SHOWN_REQUESTS == 0:
                say(f"{counts.requests} of {len(requests)} requests, {counts.hits} of {counts.block_references} hit")
    finally:
        engine.close()
    counts.elapsed_s = time.perf_counter() - began_s
    return counts, engine.block_bytes


def _tokens(block: int) -> list[int]:
    """Token ids that no other block has."""
    low, high = block & 0xFFFFFF, block >> 24 & 0xFFFFFF
    return [low, high, *range(_CHUNK_TOKENS - 2)]


def _content(block: int, plane: int) -> bytes:
    """Bytes of one plane of a block: different in each block and plane."""
    word = ((block * 1_000_003 + plane + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1).to_bytes(8, "little")
    return word * (_PLANE_BYTES // 8)
