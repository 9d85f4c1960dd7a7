"""Puts the stand-ins in the place of lightllm's own classes, in each process, as lightllm's modules are imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

from kvpool.core.errors import InvalidRequest

_CLIENT_MODULE = "lightllm.server.multi_level_kv_cache.cpu_cache_client"
_WORKER_MODULE = "lightllm.server.multi_level_kv_cache.disk_cache_worker"
_HASH_MODULE = "lightllm.utils.kv_cache_utils"


def install_when_imported() -> None:
    """For a sitecustomize.py: costs nothing in processes that never import lightllm. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _change_client(module: Any) -> None:
    from kvpool.connectors.contrib.lightllm.client import CpuKvCacheClient

    if hasattr(module, "CpuPageAllocState"):
        raise InvalidRequest(
            "this lightllm asks its CPU cache who owns a page (CpuPageAllocState), which is not served: use a revision "
            "up to the one that is named in kvpool/connectors/README.md, or start without install_when_imported"
        )
    module.CpuKvCacheClient = CpuKvCacheClient


def _change_hash(module: Any) -> None:
    """One client for each process that hashes prompts, made with the first of them."""
    clients: list[Any] = []

    def compute_token_list_hash(tokens: Sequence[int], cpu_cache_token_page_size: int) -> list[int]:
        from kvpool.connectors.contrib.lightllm.client import CpuKvCacheClient

        if not clients:
            clients.append(CpuKvCacheClient(only_create_meta_data=True, init_shm_data=False))
        hashes: list[int] = clients[0].compute_token_list_hash(tokens, cpu_cache_token_page_size)
        return hashes

    module.compute_token_list_hash = compute_token_list_hash


def _make_worker(module: Any) -> None:
    from kvpool.connectors.contrib.lightllm.client import PoolCacheWorker

    module.DiskCacheWorker = PoolCacheWorker


_CHANGES: Mapping[str, Callable[[Any], None]] = MappingProxyType(
    {_CLIENT_MODULE: _change_client, _HASH_MODULE: _change_hash}
)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules to be changed before anybody else does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _WORKER_MODULE:  # lightllm's own wants a library of its own as soon as it is imported
            return importlib.util.spec_from_loader(fullname, _Loader(None, _make_worker))
        if fullname not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _CHANGES[fullname])
        return spec


class _Loader(importlib.abc.Loader):
    """Loads as the loader that was found does, if any, and then makes the change."""

    def __init__(self, found: importlib.abc.Loader | None, change: Callable[[Any], None]) -> None:
        self._found, self._change = found, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the loader that was found."""
        return self._found.create_module(spec) if self._found is not None else None

    def exec_module(self, module: ModuleType) -> None:
        """As the loader that was found, then the change."""
        if self._found is not None:
            self._found.exec_module(module)
        self._change(module)
