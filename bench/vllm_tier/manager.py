"""The tiers under vLLM's own TieringOffloadingManager, without a GPU: GB/s between its CPU region and the tier.

vLLM's CPU build suffices. What a scheduler and workers do is played, a step a millisecond, as an engine core that has
nothing to compute takes them.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.rig.machine import CopyBaseline
from bench.vllm_gpu.samples import Recorder
from bench.vllm_tier.store import TierStores, takes_direct_io
from kvpool.client.streaming_copy import copy
from kvpool.connectors.vllm.tier.settings import usual_copy_threads

GROUPS_OF_KEYS = 1 << 20  # numbers of chunks of one sample


class ManagedTier:
    """One server's manager with one tier."""

    def __init__(self, name: str, tier: dict[str, Any], chunk_bytes: int, chunk_count: int) -> None:
        from tests.vllm.tier_process import Server

        extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
        printed = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        self._server = Server(f"bench-{name}", json.dumps(printed), {}, chunk_count, chunk_bytes, 1, False, {})
        self._chunk_count = chunk_count
        self._slots = np.asarray(self._server.manager.primary_tier.get_kv_memoryview())
        random = np.random.default_rng(3).integers(-128, 128, chunk_bytes, np.int8)
        for slot in self._slots:
            slot[:] = random

    def store(self, sample: int) -> float:
        """Seconds until the tier has all chunks of a sample."""
        server = self._server
        request, keys = server.new_request(), self._keys(sample)
        prepared = server.manager.prepare_store(keys, request)
        for number, chunk in enumerate(prepared.store_spec.chunk_ids):
            self._slots[chunk][:8] = np.array([sample * GROUPS_OF_KEYS + number]).view(np.int8)
        started_s = time.perf_counter()
        server.manager.complete_store(prepared.keys_to_store, request)
        server.manager.on_request_finished(request)
        server.settle()
        return time.perf_counter() - started_s

    def load(self, sample: int) -> float:
        """Seconds until vLLM's region has all chunks of a sample. raises: ValueError if it is not what was stored."""
        from vllm.v1.kv_offload.base import LookupResult

        server = self._server
        server.manager.reset_cache()  # what is in the region is forgotten
        server.step()
        for slot in self._slots:
            slot[:8] = 0
        request, keys = server.new_request(), self._keys(sample)
        answers: dict[Any, LookupResult] = {}
        started_s = time.perf_counter()
        while len(answers) < len(keys):
            for key in keys:
                if key not in answers:
                    answer = server.manager.lookup(key, request)
                    if answer in (LookupResult.HIT, LookupResult.MISS):
                        answers[key] = answer
            server.step()
        seconds = time.perf_counter() - started_s
        if LookupResult.MISS in answers.values():
            raise ValueError(f"{list(answers.values()).count(LookupResult.MISS)} of {len(keys)} chunks are misses")
        chunks = server.manager.prepare_load(keys, request).chunk_ids
        found = [int(self._slots[chunk][:8].view(np.int64)[0]) - sample * GROUPS_OF_KEYS for chunk in chunks]
        if found != list(range(len(keys))):
            raise ValueError("chunks came in places of others")
        server.manager.complete_load(keys, request)
        server.manager.on_request_finished(request)
        server.step()
        return seconds

    def close(self) -> None:
        """Give its region back."""
        del self._slots
        self._server.close()

    def _keys(self, sample: int) -> list[Any]:
        from tests.vllm.tier_process import chunk_keys

        return chunk_keys(sample, 0, self._chunk_count)


def measure_managers(
    stores: TierStores, record: Recorder, chunk_bytes: int, chunk_count: int, samples: int, after: Callable[[], None]
) -> None:
    """Stores, loads from memory, and loads of what is cold on disk; both tiers and a memcpy take turns."""
    from tests.vllm.tier_process import init_hashes

    init_hashes()
    size_bytes = chunk_bytes * chunk_count
    limits = dict.fromkeys(("load_timeout_s", "store_timeout_s", "room_wait_s"), 60.0)
    pool_tier = stores.pool_tier(**limits, store_bytes_in_flight_max=size_bytes)
    tiers = {
        "tier": ManagedTier("tier", pool_tier, chunk_bytes, chunk_count),
        "fs": ManagedTier("fs", stores.file_tier(), chunk_bytes, chunk_count),
    }
    record.note("direct I/O", takes_direct_io(stores.files))
    memcpy = CopyBaseline(chunk_bytes, chunk_count)

    def add(name: str, kind: str, sample: int, seconds: float) -> None:
        if sample >= 0:  # the others warm up: memory is touched for the first time
            record.add(name, kind, size_bytes / seconds / 1e9, run=sample)

    for sample in range(-2, samples):
        number = sample + 3
        add("store", "tier", sample, tiers["tier"].store(number))
        add("load from memory", "tier", sample, tiers["tier"].load(number))
        add("store", "fs", sample, tiers["fs"].store(number))
        stores.make_cold()
        for kind in ("tier", "fs") if number % 2 else ("fs", "tier"):
            add("load from disk", kind, sample, tiers[kind].load(number))
        if sample >= 0:
            record.add("memcpy", "none", memcpy.rate(), run=sample)
        after()
    counts = sorted({1, 4, 8, usual_copy_threads(), len(os.sched_getaffinity(0))})
    streaming = CopyBaseline(chunk_bytes, chunk_count, lambda source, target: copy(source.data, target.data))
    for way, baseline in (("memcpy", memcpy), ("the tier's copies", streaming)):
        rates = {count: statistics.median(baseline.rate(count) for _ in range(samples)) for count in counts}
        record.note(f"GB/s of {way} by threads", {str(count): round(each, 2) for count, each in rates.items()})
    for tier in tiers.values():
        tier.close()
