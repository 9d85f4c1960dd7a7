"""SGLang's HiCache keeps its third level in the cluster: a storage backend, loaded by name.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvpool",
      "module_path": "kvpool.connectors.sglang", "class_name": "KvPoolHiCache", "interface_v1": 1, ...}'

Pages go from SGLang's host pool to the pagestore's arena and back with one copy each. Whatever fails is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, cast

import numpy as np

from kvpool.client.store_config import StoreConfig, check_names
from kvpool.client.store_sync import StorePages
from kvpool.client.store_values import ChunkPlace, OpenedShards
from kvpool.connectors.sglang_pools import HostPages, Identity, StorageConfig, host_pages, page_key_rule
from kvpool.connectors.sglang_side_pools import (
    ALL_PAGES,
    TRAILING_PAGES,
    PoolHits,
    Refusals,
    SidePool,
    pool_name,
    restorable_prefixes,
)
from kvpool.connectors.strided_pages import StridedPages, bytes_of
from kvpool.core.chunks import GROUP_CHUNKS, ROOT_HASH
from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool.core.external_keys import foreign_chunk_hash

_log = logging.getLogger(__name__)
CLASS_NAME = "KvPoolHiCache"
# Of SGLang itself, or of its loading of backends.
_SGLANG_SETTINGS = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"})


def __getattr__(name: str) -> object:
    """The backend class needs SGLang's own base class, so it is made when it is first asked for."""
    if name == CLASS_NAME:
        return backend_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@lru_cache(maxsize=1)
def backend_class() -> type:
    """KvPoolHiCache: HiCacheCalls as a HiCacheStorage of the SGLang that is installed here."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    return type(CLASS_NAME, (HiCacheCalls, HiCacheStorage), {"__doc__": HiCacheCalls.__doc__})


class HiCacheCalls:
    """HiCache storage over a kvpool cluster. Thread-safe; keys are SGLang's page hashes."""

    def __init__(self, storage_config: StorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """raises: InvalidRequest naming a setting that is missing or wrong."""
        settings = storage_config.extra_config or {}
        self._identity = _identity(settings, storage_config)
        self._config = storage_config
        self._pool = StorePages(StoreConfig.of(settings), f"sglang tp {storage_config.tp_rank}")
        self._host: HostPages | None = None
        self._space: OpenedShards | None = None
        self._side_pools: dict[str, SidePool] = {}
        self._transfers = _Transfers()
        self._refusals = Refusals()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool and open its keyspace; an index that cannot be reached is tried again with each call.

        raises: GeometryUnsupported, InvalidRequest, KeyspaceMismatch and the like: what the configuration must change.
        """
        self.mem_pool_host = mem_pool_host
        self._host = host_pages(mem_pool_host, self._config, self._identity)
        self._space = self._pool.open(self._host.space)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """SGLang names all pools of a model here, the one above among them.

        raises: GeometryUnsupported for one that is not served: without a part of its state a prefix is of no use.
        """
        if host_pool is not getattr(self, "mem_pool_host", None):
            side = SidePool(self._pool, host_pool, host_pool_name, self._config, self._identity, page_key_rule())
            self._side_pools[side.name] = side

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """The longest prefix of which every pool has what is needed, as SGLang's PoolTransferResult."""
        from sglang.srt.mem_cache.hicache_storage import PoolTransferResult

        kv_pages = self.batch_exists(keys, extra_info)
        hits = {"kv": kv_pages} if kv_pages else {}
        pools: list[PoolHits] = []
        restorable = restorable_prefixes(kv_pages, pools)
        for transfer in pool_transfers or ():
            if not restorable:
                break
            name, policy = pool_name(transfer.name), pool_name(transfer.hit_policy)
            side = self._side_pools.get(name)
            if side is None or policy not in (ALL_PAGES, TRAILING_PAGES):
                _log.error("kvpool: the side pool %s with policy %s is not served: nothing is loaded", name, policy)
                return PoolTransferResult.empty()
            pools.append(PoolHits(policy, side.exists(keys[:kv_pages]), len(transfer.keys or ())))
            own = restorable_prefixes(kv_pages, pools[-1:])
            if own:
                hits[name] = own[-1]
            restorable = restorable_prefixes(kv_pages, pools)
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of side pools; of each, which came."""
        return self._each_pool(transfers, lambda side, keys, slots: side.get(keys, slots))

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Write pages of side pools; of each, which are in the cluster now."""
        return self._each_pool(transfers, lambda side, keys, slots: side.put(keys, slots))

    def _each_pool(
        self, transfers: Sequence[Any], move: Callable[[SidePool, Sequence[str], Any], list[bool]]
    ) -> dict[str, list[bool]]:
        moved: dict[str, list[bool]] = {}
        for transfer in transfers:
            name, keys = pool_name(transfer.name), transfer.keys or []
            try:
                side = self._side_pools.get(name)
                moved[transfer.name] = move(side, keys, transfer.host_indices) if side else [False] * len(keys)
            except Exception:  # SGLang's thread would end, and with it all transfers
                _log.exception("kvpool: pages of the side pool %s were not moved", name)
                moved[transfer.name] = [False] * len(keys)
        return moved

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Leading pages that are in the cluster."""
        space = self._opened()
        if space is None or not keys:
            return 0
        found = self._pool.find(space, self._places(space, keys, extra_info))
        return found.index(False) if False in found else len(found)

    def exists(self, key: str) -> bool:
        """Whether a page is in the cluster."""
        return bool(self.batch_exists([key]))

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool. host_indices: [pages * page size] token slots."""
        host, space = self._host, self._opened()
        if host is None or space is None or not keys:
            return [False] * len(keys)
        pages = _page_numbers(host, keys, host_indices)

        def take(position: int, shard: int, payload: memoryview) -> None:
            host.pages.scatter(pages[position], shard, payload)

        started_s = time.perf_counter()
        got = self._pool.get(space, self._places(space, keys, extra_info), take)
        self._transfers.note("prefetch", sum(got), self._page_bytes(space), time.perf_counter() - started_s)
        return got

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Write pages from the host pool; True also for those that are there already."""
        host, space = self._host, self._opened()
        if host is None or space is None or not keys:
            return [False] * len(keys)
        pages = _page_numbers(host, keys, host_indices)

        def fill(position: int, shard: int, payload: memoryview) -> None:
            host.pages.gather(pages[position], shard, payload)

        started_s = time.perf_counter()
        put = self._pool.put(space, self._places(space, keys, extra_info), fill)
        self._transfers.note("backup", sum(put), self._page_bytes(space), time.perf_counter() - started_s)
        return put

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Read a page into a tensor of its own, which is returned; None if it cannot be had."""
        return self.batch_get([key], [target_location])[0] if target_location is not None else None

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """The same for several pages."""
        space, single = self._opened(), self._single_pages(target_locations, len(keys))
        if space is None or single is None:
            return [None] * len(keys)

        def take(position: int, shard: int, payload: memoryview) -> None:
            single[position].scatter(0, shard, payload)

        got = self._pool.get(space, self._places(space, keys, None), take)
        return [target if one else None for one, target in zip(got, target_locations, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Write a page from a tensor of its own."""
        return self.batch_set([key], [value if value is not None else target_location])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write pages from tensors of their own; whether all are in the cluster."""
        space, single = self._opened(), self._single_pages(values, len(keys))
        if space is None or single is None:
            return False

        def fill(position: int, shard: int, payload: memoryview) -> None:
            single[position].gather(0, shard, payload)

        return all(self._pool.put(space, self._places(space, keys, None), fill))

    def clear(self) -> bool:
        """Drop the keyspace's pages on every pagestore of the cluster."""
        space = self._opened()
        return space is not None and all(
            [self._pool.clear(space), *(side.clear() for side in self._side_pools.values())]
        )

    def get_stats(self) -> Any:
        """Pages and bandwidth since the last call, as SGLang's StorageMetrics."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return StorageMetrics(**self._transfers.drain())

    def describe(self) -> dict[str, Any]:
        """Whether the pagestore can be reached, and everything counted since the start."""
        counts = self._pool.counts
        counted = {one.name: getattr(counts, one.name) for one in fields(counts)}
        return {"connected": self._pool.connected, "keyspace_open": self._space is not None, **counted}

    def close(self) -> None:
        """End the session with the cluster. Idempotent."""
        self._pool.close()

    def _opened(self) -> OpenedShards | None:
        """Of an index that is reached only now the answer may be that the configuration must change: a miss, too, as
        an exception would end SGLang's thread, and with it all transfers."""
        if self._space is None and self._host is not None:
            try:
                self._space = self._pool.open(self._host.space)
            except KvPoolError as error:
                self._refusals.log("pages", error)
        return self._space

    def _places(self, space: OpenedShards, keys: Sequence[str], extra_info: Any) -> list[ChunkPlace]:
        """SGLang names the keys before a call's first one only if configured to; else each page stands alone."""
        hashes = [foreign_chunk_hash(space.hash_key, [key.encode()]) for key in keys]
        if not self._identity.chained:
            return [ChunkPlace.alone(chunk_hash) for chunk_hash in hashes]
        before = list(getattr(extra_info, "prefix_keys", None) or ())
        needed = before[len(before) - len(before) % GROUP_CHUNKS :][:1], before[-1:]  # group head, parent
        head, parent = ([foreign_chunk_hash(space.hash_key, [key.encode()]) for key in some] for some in needed)
        places = []
        for index, chunk_hash in enumerate(hashes, start=len(before)):
            if index % GROUP_CHUNKS == 0:
                head = [chunk_hash]
            places.append(ChunkPlace(chunk_hash, parent[0] if parent else ROOT_HASH, index, head[0]))
            parent = [chunk_hash]
        return places

    def _single_pages(self, tensors: Any, count: int) -> list[StridedPages] | None:
        """Tensors that hold one page each; None where they are none of such."""
        if self._host is None or tensors is None or len(tensors) != count:
            return None
        try:
            return [self._host.flat.of(bytes_of(tensor)) for tensor in tensors]
        except InvalidRequest as error:
            _log.error("kvpool: not served: %s", error)
            return None

    def _page_bytes(self, space: OpenedShards) -> int:
        return sum(space.payload_bytes(shard) for shard in range(64) if space.space.shards >> shard & 1)


class _Transfers:
    """What SGLang's metrics collector asks for: pages and GB/s of each call. Thread-safe, bounded."""

    _CALLS_MAX = 1024

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, list[Any]] = {}
        self.drain()

    def note(self, kind: str, pages: int, page_bytes: int, duration_s: float) -> None:
        with self._lock:
            if pages and len(self._calls[f"{kind}_pgs"]) < self._CALLS_MAX:
                self._calls[f"{kind}_pgs"].append(pages)
                self._calls[f"{kind}_bandwidth"].append(pages * page_bytes / max(duration_s, 1e-9) / 1e9)

    def drain(self) -> dict[str, list[Any]]:
        with self._lock:
            noted = self._calls
            self._calls = {f"{kind}_{name}": [] for kind in ("prefetch", "backup") for name in ("pgs", "bandwidth")}
        return noted


def _page_numbers(host: HostPages, keys: Sequence[str], host_indices: Any) -> list[int]:
    """raises: InvalidRequest unless there are whole, aligned pages for all keys."""
    indices = np.asarray(host_indices.cpu() if hasattr(host_indices, "cpu") else host_indices)
    starts = indices[:: host.page_tokens]
    whole = len(indices) == len(keys) * host.page_tokens and not (starts % host.page_tokens).any()
    if not whole or (indices.reshape(-1, host.page_tokens) != starts[:, None] + np.arange(host.page_tokens)).any():
        raise InvalidRequest(f"{len(indices)} host indices are no {len(keys)} whole pages of {host.page_tokens} tokens")
    return cast("list[int]", (starts // host.page_tokens).tolist())


def _identity(settings: dict[str, Any], config: StorageConfig) -> Identity:
    own = {one.name for one in fields(Identity)}
    check_names(settings.keys() - _SGLANG_SETTINGS, own | StoreConfig.names(), "unknown settings {}; known are {}")
    given = {name: settings[name] for name in own if name in settings}
    model_id = given.pop("model_id", None) or config.model_name
    if not model_id:
        raise InvalidRequest("model_id must be set: SGLang does not tell the model's name")
    if "model_revision" not in given:
        _log.warning(
            "kvpool: no model_revision is set; set one, or other weights of %s would be taken for these", model_id
        )
    return Identity(**{"model_id": model_id, "model_revision": "unspecified", **given})
