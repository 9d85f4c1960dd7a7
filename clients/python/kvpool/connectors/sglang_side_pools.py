"""SGLang's host pools beside the KV pool: what sliding windows, recurrent layers and sparse attention keep of a prefix.

Each is a keyspace of its own. A page of it is an object of the bytes that the pool itself gives out, so that only
engines with the same kind of pool, layout and rank have it in common.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpool.client.object_store import AsyncObjects, object_space
from kvpool.client.store_sync import StorePages
from kvpool.connectors.sglang_pools import Identity, StorageConfig, kv_identity
from kvpool.connectors.strided_pages import Bytes, bytes_of
from kvpool.core.errors import GeometryUnsupported, InvalidRequest, KvPoolError

_log = logging.getLogger(__name__)
SERVED = ("swa", "mamba", "indexer")
ALL_PAGES, TRAILING_PAGES = "all_pages", "trailing_pages"
_RANK_SHARDED = ("mamba",)  # even where all ranks have the same KV (MLA)
# What host pools say of the bytes of a page beside its size.
_ARRANGED_BY = (
    "dtype",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "storage_format_tag",
    "indexer_dtype",
    "num_mamba_layers",
    "conv_dtype",
    "conv_state_shapes",
    "temporal_dtype",
    "temporal_state_shape",
)
_COPY_BYTES = 64 << 20  # pages that are copied out of a pool, or for it, at a time


@dataclass(frozen=True, slots=True)
class PoolHits:
    """Which pages of a prefix one side pool has. trailing: of TRAILING_PAGES, how many at the end are needed."""

    policy: str
    present: Sequence[bool]
    trailing: int = 1

    def restorable(self, prefix_pages: int) -> bool:
        """Whether the pool has what a prefix of so many pages needs."""
        first = max(0, prefix_pages - max(1, self.trailing)) if self.policy == TRAILING_PAGES else 0
        return all(self.present[first:prefix_pages])


def restorable_prefixes(kv_pages: int, pools: Sequence[PoolHits]) -> list[int]:
    """Lengths, ascending, of the prefixes of which every pool has what is needed. kv_pages: leading ones with KV."""
    return [count for count in range(1, kv_pages + 1) if all(pool.restorable(count) for pool in pools)]


class Refusals:
    """Logs why nothing is shared, once for each reason in a row."""

    def __init__(self) -> None:
        self._last = ""

    def log(self, what: str, error: KvPoolError) -> None:
        """Log that `what` is not shared, unless that was the last message."""
        message, self._last = self._last, f"{what}: {error}"
        if message != self._last:
            _log.error("kvpool: computing instead of sharing %s", self._last)


def pool_name(name: Any) -> str:
    """As SGLang's PoolName says it."""
    return str(getattr(name, "value", name))


class SidePool:
    """One host pool. Calls wait, for a bounded time; what fails is a miss."""

    def __init__(
        self, pages: StorePages, host_pool: Any, name: Any, config: StorageConfig, identity: Identity, key_rule: str
    ) -> None:
        """key_rule: how this SGLang makes its page hashes.

        raises: GeometryUnsupported for a pool that is not served."""
        self.name = pool_name(name)
        if self.name not in SERVED:
            raise GeometryUnsupported(
                f"the side pool {self.name} is not served, only {', '.join(SERVED)} are: use another HiCache storage "
                "backend"
            )
        self._pages, self._host_pool, self._refusals = pages, host_pool, Refusals()
        self._page_tokens = int(getattr(host_pool, "page_size", 1) or 1)
        self._blank = host_pool.get_dummy_flat_data_page()
        self._page_bytes = bytes_of(self._blank).nbytes
        arranged = [str(getattr(host_pool, name, None)) for name in _ARRANGED_BY]
        arranged += [f"{one.dtype} {tuple(one.shape[1:])}" for one in getattr(host_pool, "slot_state_buffers", ())]
        kind = f"{self.name} {type(host_pool).__name__} {host_pool.layout} {self._page_tokens} {self._blank.dtype}"
        self.space = object_space(
            "sglang",
            identity.model_id,
            identity.model_revision,
            self._page_bytes,
            kind=kind,
            salt=[
                "side pool",
                key_rule,
                *arranged,
                *kv_identity(getattr(host_pool, "dtype", None)),
                *self._rank(config),
            ],
        )

    def _rank(self, config: StorageConfig) -> list[str]:
        same_on_all = config.is_mla_model and self.name not in _RANK_SHARDED
        tensor = [] if same_on_all else [f"tp {config.tp_rank}/{config.tp_size}"]
        return [*tensor, f"pp {config.pp_rank}/{config.pp_size}", f"cp {config.attn_cp_rank}/{config.attn_cp_size}"]

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are in the cluster."""
        return self._run(lambda objects: objects.exists(keys), len(keys))

    def get(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Read pages into the pool. host_indices: [pages * page size] slots, those of a page follow each other."""
        got: list[bool] = []
        for part, slots in self._parts(keys, host_indices):
            copies = [self._blank.new_empty(self._blank.shape) for _ in part]  # not pinned, as the pool's own would be
            buffers = [bytes_of(copy) for copy in copies]
            came = self._run(partial(_get, part, buffers), len(part))
            for slot, copy, one in zip(slots, copies, came, strict=True):
                if one:
                    self._host_pool.set_from_flat_data_page(slot, copy)
            got += came
        return got

    def put(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Write pages from the pool; which of them are in the cluster now."""
        stored: list[bool] = []
        for part, slots in self._parts(keys, host_indices):
            buffers = [bytes_of(self._host_pool.get_data_page(slot, flat=True).contiguous()) for slot in slots]
            stored += self._run(partial(_put, part, buffers), len(part))
        return stored

    def clear(self) -> bool:
        """Drop the pool's pages on every pagestore of the cluster."""
        return all(self._run(_clear, 1))

    def _parts(self, keys: Sequence[str], host_indices: Any) -> Iterator[tuple[Sequence[str], list[int]]]:
        if host_indices is None or len(host_indices) != len(keys) * self._page_tokens:
            found = 0 if host_indices is None else len(host_indices)
            raise InvalidRequest(f"{found} slots of {self.name} are not {len(keys)} pages of {self._page_tokens}")
        slots = [int(slot) for slot in host_indices[:: self._page_tokens]]
        step = max(1, _COPY_BYTES // self._page_bytes)
        for first in range(0, len(keys), step):
            yield keys[first : first + step], slots[first : first + step]

    def _run(self, work: Callable[[AsyncObjects], Awaitable[list[bool]]], count: int) -> list[bool]:
        try:
            return self._pages.run(lambda pages: work(AsyncObjects(pages, self.space, self._page_bytes)), count)
        except KvPoolError as error:
            self._refusals.log(f"the side pool {self.name}", error)
            return [False] * count


async def _get(keys: Sequence[str], buffers: Sequence[Bytes], objects: AsyncObjects) -> list[bool]:
    return await objects.get(keys, buffers)


async def _put(keys: Sequence[str], buffers: Sequence[Bytes], objects: AsyncObjects) -> list[bool]:
    return await objects.put(keys, buffers)


async def _clear(objects: AsyncObjects) -> list[bool]:
    return [await objects.clear()]
