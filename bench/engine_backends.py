"""How fast do SGLang's and LMCache's host memory and the arena exchange pages through the connectors without an agent?

A cluster on this machine. Batches of 64 MiB in pages of 64 tokens (8B Llama shape, bf16; a rank of TP 8 has 1 MiB of
each, one of TP 1 has 8 MiB) are written and read by the calls that HiCache's storage threads make, and as LMCache
objects, beside a memcpy of as many bytes by one thread that takes turns with them. Neither engine is needed: their host
pools and objects are stood in for.

Run: python -m bench.engine_backends [--samples 7] [--ranks 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.rig.cluster import bench_cluster
from kvpool.client.config import ClientConfig
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.client.store_config import StoreConfig
from kvpool.client.store_sync import StorePages
from kvpool.connectors.lmcache_objects import ObjectBatch, ObjectNames, layout_of_object
from kvpool.connectors.sglang import HiCacheCalls
from kvpool_cli.cluster import ClusterOptions
from tests.fixtures.host_pools import MhaPool, StorageConfig

BATCH_BYTES, PAGE_TOKENS, LAYERS, HEADS = 64 << 20, 64, 32, 8
HEAD_BYTES = 2 * LAYERS * PAGE_TOKENS * 128 * 2  # of a page
WARM_UP = 5  # batches, which fill the arena


@dataclass
class Case:
    """write, read: move one batch of pages, named by a sample's number."""

    name: str
    write: Callable[[int], None]
    read: Callable[[int], None]
    close: Callable[[], None]


def sglang_case(settings: dict[str, Any], layout: str, ranks: int) -> Case:
    """batch_set_v1 and batch_get_v1 of one rank."""
    heads = HEADS // ranks
    page_count = BATCH_BYTES // (heads * HEAD_BYTES)
    pool = MhaPool(layout, layers=LAYERS, heads=heads, head_dim=128, page_size=PAGE_TOKENS, pages=2 * page_count)
    pool.kv_buffer.view(torch.uint8).random_(0, 256)
    given = {**settings, "model_revision": "1", "kv_heads": HEADS}
    backend = HiCacheCalls(StorageConfig(tp_size=ranks, model_name=layout, extra_config=given))
    backend.register_mem_pool_host(pool)
    here, there = (pool.slots(list(range(first, first + page_count))) for first in (0, page_count))

    def keys(sample: int) -> list[str]:
        return [f"{layout} {sample} {page}" for page in range(page_count)]

    def write(sample: int) -> None:
        assert all(backend.batch_set_v1(keys(sample), here))

    def read(sample: int) -> None:
        assert all(backend.batch_get_v1(keys(sample), there))

    return Case(f"SGLang, {layout}", write, read, backend.close)


def lmcache_case(settings: dict[str, Any], ranks: int) -> Case:
    """Store and load tasks of objects, as the adapter does them."""
    pool = StorePages(StoreConfig.of(settings), "bench")
    shape = torch.Size([2, LAYERS, PAGE_TOKENS, HEADS // ranks * 128])
    object_bytes = HEADS // ranks * HEAD_BYTES
    object_count = BATCH_BYTES // object_bytes

    def made() -> list[Any]:
        objects = []
        for _ in range(object_count):
            raw = bytearray(np.random.default_rng(1).bytes(object_bytes))
            metadata = SimpleNamespace(shapes=[shape], dtypes=[torch.bfloat16])
            objects.append(SimpleNamespace(byte_array=raw, metadata=metadata, get_size=lambda: object_bytes))
        return objects

    here, there, names = made(), made(), ObjectNames("1", "")
    layouts = [layout_of_object(one) for one in here]

    def batch(sample: int, objects: list[Any]) -> ObjectBatch:
        keys = [
            SimpleNamespace(
                chunk_hash=f"{sample} {at}".encode(), model_name="m", kv_rank=0, object_group_id=0, cache_salt=""
            )
            for at in range(object_count)
        ]
        return ObjectBatch(names, keys, layouts, objects)

    def write(sample: int) -> None:
        assert all(pool.start(lambda own: batch(sample, here).store(own, [])).result())

    def read(sample: int) -> None:
        assert all(pool.start(lambda own: batch(sample, there).load(own)).result())

    return Case("LMCache objects", write, read, pool.close)


def timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def measure(case: Case, samples: int, settle: Callable[[], None]) -> dict[str, dict[str, Any]]:
    """GB/s as medians, without the samples that warm up: until then arena memory is touched for the first time."""
    source = np.random.default_rng(2).integers(0, 256, BATCH_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    taken: dict[str, list[float]] = {"store": [], "load": [], "memcpy": []}
    for sample in range(-WARM_UP, samples):
        stored_s = timed(partial(case.write, sample))
        settle()  # write-back is not what is asked for here
        loaded_s = timed(partial(case.read, sample))
        copied_s = timed(partial(np.copyto, target, source))
        if sample >= 0:
            for kind, value in (("store", stored_s), ("load", loaded_s), ("memcpy", copied_s)):
                taken[kind].append(BATCH_BYTES / value / 1e9)
    speeds = {kind: statistics.median(values) for kind, values in taken.items()}
    return {
        f"{case.name}, {kind}": {
            "value": round(speeds[kind], 2),
            "unit": "GB/s",
            "baseline": round(speeds["memcpy"], 2),
            "ratio": round(speeds[kind] / speeds["memcpy"], 3),
        }
        for kind in ("store", "load")
    }


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--ranks", type=int, choices=[1, 2, 4, 8], default=8, help="that share the heads (default: 8)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    options = ClusterOptions(state_dir=Path(), agents=0, arena_bytes=256 << 20, disk_bytes=8 << 30)
    with bench_cluster(options) as (state, _):
        (index,), (store,) = state.of_role("index"), state.of_role("pagestore")
        settings: dict[str, Any] = {
            "index_endpoints": [index.endpoints["endpoint"]],
            "pagestore": f"unix:{store.endpoints['socket']}",
            "load_timeout_s": 20.0,
            "store_timeout_s": 20.0,
        }

        async def flush() -> None:
            control = PageStoreControl(settings["pagestore"], ClientConfig())
            await control.flush()
            await control.close()

        layouts = [partial(sglang_case, settings, layout, arguments.ranks) for layout in ("page_first", "layer_first")]
        for make in (*layouts, partial(lmcache_case, settings, arguments.ranks)):
            case = make()
            found |= measure(case, arguments.samples, lambda: asyncio.run(flush()))
            case.close()
    for name, one in found.items():
        print(f"{name:32} {one['value']:6.2f} GB/s  memcpy {one['baseline']:6.2f}  ratio {one['ratio']:.2f}")
    if arguments.json:
        about = {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": "2-core virtual machine",
            "command": f"python -m bench.engine_backends --samples {arguments.samples} --ranks {arguments.ranks}",
        }
        arguments.json.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
