"""A shared KV cache for LLM engines: load the KV of a prompt's prefix instead of computing it, store what was computed.

    model = kvpool.Model("my-model", "rev1", layers=32, kv_heads=8, head_dim=128, dtype="bf16")
    cache = kvpool.PagedCache(kv_tensors, model, layout="vllm", block_size=16)
    with kvpool.connect("unix:/run/kvpool/agent.sock", cache) as pool:
        prompt = pool.prompt(token_ids)
        loaded = pool.load(prompt, block_table)

What is named here is the public API, see docs/python-client.md; no submodule is. Modules are imported when a name is
first used: `import kvpool` alone loads neither gRPC nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvpool.client.checkpoint import checkpoint_model as checkpoint_model
    from kvpool.client.config import ClientConfig as ClientConfig
    from kvpool.client.engine_items import EngineSource as EngineSource
    from kvpool.client.engine_items import LoadResult as LoadResult
    from kvpool.client.engine_items import MatchResult as MatchResult
    from kvpool.client.engine_items import RequestStats as RequestStats
    from kvpool.client.engine_items import StoreResult as StoreResult
    from kvpool.client.engine_items import TierTokens as TierTokens
    from kvpool.client.handle import AsyncHandle as AsyncHandle
    from kvpool.client.hashing import Prompt as Prompt
    from kvpool.client.object_store import Store as Store
    from kvpool.client.object_store import connect_store as connect_store
    from kvpool.client.paged_cache import PagedCache as PagedCache
    from kvpool.client.pool import AsyncPool as AsyncPool
    from kvpool.client.store_config import StoreConfig as StoreConfig
    from kvpool.client.sync import Handle as Handle
    from kvpool.client.sync import Pool as Pool
    from kvpool.client.sync import connect as connect
    from kvpool.core import errors as errors
    from kvpool.core.chunks import Extra as Extra
    from kvpool.core.chunks import multimodal_extra as multimodal_extra
    from kvpool.core.errors import KvPoolError as KvPoolError
    from kvpool.core.layout import EngineLayout as EngineLayout
    from kvpool.core.layout import LayerLayout as LayerLayout
    from kvpool.core.layout import RowPlane as RowPlane
    from kvpool.core.model import Model as Model
    from kvpool.core.retention import Retention as Retention

__version__ = "0.1.0"

_HOMES: Final = {
    "AsyncHandle": "kvpool.client.handle",
    "AsyncPool": "kvpool.client.pool",
    "ClientConfig": "kvpool.client.config",
    "EngineLayout": "kvpool.core.layout",
    "EngineSource": "kvpool.client.engine_items",
    "Extra": "kvpool.core.chunks",
    "Handle": "kvpool.client.sync",
    "KvPoolError": "kvpool.core.errors",
    "LayerLayout": "kvpool.core.layout",
    "LoadResult": "kvpool.client.engine_items",
    "MatchResult": "kvpool.client.engine_items",
    "Model": "kvpool.core.model",
    "PagedCache": "kvpool.client.paged_cache",
    "Pool": "kvpool.client.sync",
    "Prompt": "kvpool.client.hashing",
    "RequestStats": "kvpool.client.engine_items",
    "Retention": "kvpool.core.retention",
    "RowPlane": "kvpool.core.layout",
    "Store": "kvpool.client.object_store",
    "StoreConfig": "kvpool.client.store_config",
    "StoreResult": "kvpool.client.engine_items",
    "TierTokens": "kvpool.client.engine_items",
    "checkpoint_model": "kvpool.client.checkpoint",
    "connect": "kvpool.client.sync",
    "connect_store": "kvpool.client.object_store",
    "multimodal_extra": "kvpool.core.chunks",
}
__all__ = [
    "AsyncHandle",
    "AsyncPool",
    "ClientConfig",
    "EngineLayout",
    "EngineSource",
    "Extra",
    "Handle",
    "KvPoolError",
    "LayerLayout",
    "LoadResult",
    "MatchResult",
    "Model",
    "PagedCache",
    "Pool",
    "Prompt",
    "RequestStats",
    "Retention",
    "RowPlane",
    "Store",
    "StoreConfig",
    "StoreResult",
    "TierTokens",
    "checkpoint_model",
    "connect",
    "connect_store",
    "errors",
    "multimodal_extra",
]


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("kvpool.core.errors")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
