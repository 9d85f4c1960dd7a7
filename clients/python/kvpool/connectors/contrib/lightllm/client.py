"""lightllm's multi-level cache over the cluster: stand-ins for its CPU-cache client and for its disk worker.

`install` puts them in the place of lightllm's own. Pages of the CPU cache stay lightllm's shared memory, which
its kernels copy to and from; the level below is the cluster.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from kvpool.connectors.contrib.lightllm.calls import CallClient
from kvpool.connectors.contrib.lightllm.owner import CacheOwner
from kvpool.connectors.contrib.lightllm.settings import LightLlmSettings, settings_of_server
from kvpool.core.chunks import Tokens, chunk_hashes
from kvpool.core.errors import InvalidRequest, KvPoolError

_log = logging.getLogger(__name__)
_WAIT_S = 0.1


class CacheLock:
    """lightllm takes a lock around its calls. Each call is whole by itself here, so this does nothing."""

    def acquire_sleep1ms(self) -> None:
        """See CacheLock."""

    def release(self) -> None:
        """See CacheLock."""


class CpuKvCacheClient:
    """The calls of lightllm's class of that name, with the same arguments and answers.

    The process that gives init_shm_data owns the cache; in the others a call is one message to it. An owner that is
    away means no page: nothing raises for it.
    """

    def __init__(
        self, only_create_meta_data: bool, init_shm_data: bool, settings: LightLlmSettings | None = None
    ) -> None:
        """settings: only where there is no lightllm to ask.

        raises: GeometryUnsupported, InvalidRequest, KeyspaceMismatch and the like: what the configuration must change.
        """
        self._settings = settings if settings is not None else settings_of_server()
        self.kv_cache_tensor_meta = self._settings.meta
        self.page_num: int = self._settings.meta.page_num
        self.lock = CacheLock()
        self.owner: CacheOwner | None = None
        if not only_create_meta_data:
            self.cpu_kv_cache_tensor = self._settings.tensor(init_shm_data)
            if init_shm_data:
                self.owner = CacheOwner(self._settings, self.cpu_kv_cache_tensor)
        self._calls = self.owner or CallClient(self._settings.socket)
        self._hash_key = b""
        self._images_logged = False

    def allocate_pages(self, hash_keys: Sequence[int], disk_offload_enable: bool) -> tuple[list[int], list[bool]]:
        """A page for each chunk, and whether its bytes are there; -1 from the first one for which none is free."""
        missing: tuple[list[int], list[bool]] = [-1] * len(hash_keys), [False] * len(hash_keys)
        pages, ready = self._ask("allocate_pages", list(hash_keys), otherwise=missing)
        return pages, ready

    def update_pages_status_to_ready(
        self,
        page_list: Sequence[int],
        deref: bool = True,
        disk_offload_enable: bool = False,
        token_num_in_page_list: int | None = None,
    ) -> None:
        """The bytes of pages are in place, for all ranks. disk_offload_enable: the leading ones are to be stored."""
        if disk_offload_enable and token_num_in_page_list is None:
            raise ValueError("token_num_in_page_list must be given with disk_offload_enable")
        long_enough = (token_num_in_page_list or 0) >= self._settings.offload_tokens_min
        self._ask("update_pages_status_to_ready", list(page_list), deref, disk_offload_enable and long_enough)

    def query_one_page(self, hash_key: int) -> tuple[int | None, bool]:
        """The page of a chunk whose bytes are there, with one user more."""
        page = self._ask("query_one_page", hash_key)
        return page, page is not None

    def check_allpages_ready(self, page_list: Sequence[int]) -> bool:
        """Whether the bytes of all pages are there; the owner must confirm before any use."""
        return bool(self._ask("check_allpages_ready", list(page_list), otherwise=not page_list))

    def deref_pages(self, page_list: Sequence[int]) -> None:
        """One user less for each page."""
        self._ask("deref_pages", list(page_list))

    def deref_one_page(self, page_index: int) -> None:
        """One user less."""
        self._ask("deref_pages", [page_index])

    def recycle_pages(self, page_list: Sequence[int]) -> None:
        """Loading has failed: one user less, and pages without other waiters are empty again."""
        self._ask("recycle_pages", list(page_list))

    def get_pages_to_offloading(self) -> list[list[int]]:
        """Groups of pages to be stored, each held until `deref_pages`. For the owner; `PoolCacheWorker` does it."""
        return [list(group.pages) for group in self.owner.take_groups(0.0)] if self.owner is not None else []

    def compute_token_list_hash(self, tokens: Tokens, cpu_cache_token_page_size: int) -> list[int]:
        """128-bit numbers: the chunk hashes of all full pages of tokens[:-1], those that every other engine computes.

        None for prompts with images or audio, whose token ids say nothing of what is in them, and as long as the
        keyspace was never opened: then the prompt is served without the cache.
        """
        import numpy as np

        if len(tokens) and int(np.max(np.asarray(tokens))) >= self._settings.vocabulary:
            if not self._images_logged:
                _log.warning(
                    "kvpool: prompts with images or audio are not shared: the ids of their tokens (from %d on) name "
                    "other content in another server",
                    self._settings.vocabulary,
                )
            self._images_logged = True
            return []
        if not self._hash_key:
            self._hash_key = bytes.fromhex(self._ask("hash_key", otherwise=""))
        if not self._hash_key or len(tokens) < 2:
            return []
        hashes = chunk_hashes(self._hash_key, tokens[: len(tokens) - 1], cpu_cache_token_page_size)
        return [int.from_bytes(one, "big") for one in hashes]

    def close(self) -> None:
        """End the session with the cluster, or with the owner. Idempotent."""
        self._calls.close()

    def _ask(self, name: str, *arguments: Any, otherwise: Any = None) -> Any:
        try:
            return self._calls.call(name, *arguments)
        except InvalidRequest:
            raise  # of the caller
        except KvPoolError as error:
            _log.warning("kvpool: going on without the CPU cache: %s", error)
            return otherwise


class PoolCacheWorker:
    """The calls of lightllm's DiskCacheWorker, with the cluster in the place of its disk. For the owner's process."""

    def __init__(
        self, disk_cache_storage_size: float, cpu_cache_client: CpuKvCacheClient, disk_cache_dir: str | None = None
    ) -> None:
        """Sizes and places are those of the pagestore; lightllm's settings of its own disk are not used."""
        if cpu_cache_client.owner is None:
            raise ValueError("the worker belongs into the process that owns the CPU cache")
        self.cpu_cache_client = cpu_cache_client
        self._owner = cpu_cache_client.owner
        self.service = SimpleNamespace(_n=1)  # pages of one unit of storage
        self._stopped = False

    def run(self) -> None:
        """Store groups until `stop`."""
        while not self._stopped:
            self.run_once(_WAIT_S)

    def run_once(self, timeout_s: float) -> int:
        """Wait for groups and store them; how many there were."""
        groups = self._owner.take_groups(timeout_s)
        for group in groups:
            try:
                self._owner.store(group)
            except Exception:  # the groups behind it hold pages too, and lightllm has no other worker
                _log.exception("kvpool: %d pages were not stored", len(group.pages))
        return len(groups)

    def stop(self) -> None:
        """End `run` soon."""
        self._stopped = True

    def query_loadable_pages(self, hashs: Sequence[int], start_pos: int) -> int:
        """Chunks from start_pos on that the cluster has, without a gap."""
        return self._owner.loadable(hashs, start_pos) if 0 <= start_pos < len(hashs) else 0

    def load_pages(self, hashs: Sequence[int], page_indexes: Sequence[int], start_pos: int = 0) -> bool:
        """Load chunks from start_pos on into their pages; whether all came."""
        if len(hashs) != len(page_indexes) or not 0 <= start_pos < len(hashs):
            return False
        return self._owner.load(hashs, page_indexes, start_pos) == len(hashs) - start_pos


@contextlib.contextmanager
def attached(settings: LightLlmSettings) -> Iterator[CpuKvCacheClient]:
    """A client of another process's cache, as lightllm's workers have one."""
    client = CpuKvCacheClient(only_create_meta_data=False, init_shm_data=False, settings=settings)
    try:
        yield client
    finally:
        client.close()
