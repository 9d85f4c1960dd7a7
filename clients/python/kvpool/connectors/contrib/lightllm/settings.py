"""What lightllm's CPU cache looks like, as it describes it itself, and the keyspace and layout that follow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvpool.client.store_config import StoreConfig
from kvpool.client.store_values import KeyspaceShards
from kvpool.connectors.strided_pages import StridedPages, bytes_of
from kvpool.core.cache_axes import CacheAxes
from kvpool.core.errors import GeometryUnsupported, InvalidRequest
from kvpool.core.external_keys import salt_of
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup

SETTINGS_VARIABLE = "KVPOOL_LIGHTLLM"
"""Environment variable with the settings as JSON: all processes of a server read the same."""
FIRST_IMAGE_TOKEN = 100_000_000
"""lightllm numbers tokens of images and audio from here on, in the order in which a server meets them."""
# [page, layer, token, K heads then V heads, row]; with scales each row is followed by its own.
_PAGES = CacheAxes(axes=("block", "layer", "token", "plane", "head"))
_PAGES_WITH_SCALES = CacheAxes(axes=("block", "layer", "token", "plane", "head"), scales_behind="head")
_DTYPES = {"bfloat16": Dtype.BF16, "float16": Dtype.FP16, "float32": Dtype.FP32}


class CacheMeta(Protocol):
    """What is used of lightllm's CpuKVCacheMeta. num_heads counts K and V; it is 1 for MLA."""

    page_num: int
    token_page_size: int
    layer_num: int
    num_heads: int
    head_dim: int
    data_type: Any
    scale_head_dim: int
    scale_data_type: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LightLlmSettings:
    """One server's. socket: where its processes meet. tensor(init): the pages, made or attached."""

    pool: StoreConfig
    meta: CacheMeta
    tensor: Callable[[bool], Any]
    socket: str
    model_id: str
    model_revision: str
    keyspace_name: str = ""
    offload_tokens_min: int = 0  # shorter prompts are not stored
    vocabulary: int = FIRST_IMAGE_TOKEN  # token ids from here on name no text

    def space(self) -> KeyspaceShards:
        """The keyspace. raises: GeometryUnsupported for a cache that is not served, saying why."""
        spec = keyspace_spec(self.meta, self.model_id, self.model_revision)
        return KeyspaceShards.of("lightllm", spec, self._pages_of(spec, None).shards, self.keyspace_name)

    def pages(self, tensor: Any) -> StridedPages:
        """The cache's pages. tensor: [page_num, layer_num, token_page_size, num_heads, merged row], contiguous."""
        return self._pages_of(keyspace_spec(self.meta, self.model_id, self.model_revision), tensor)

    def _pages_of(self, spec: KeyspaceSpec, tensor: Any) -> StridedPages:
        import numpy as np

        axes = _PAGES_WITH_SCALES if self.meta.scale_head_dim else _PAGES
        count = self.meta.page_num if tensor is not None else 1
        layout = axes.layout(
            spec, range(spec.group.layers), range(spec.group.kv_heads), self.meta.token_page_size, count
        )
        memory = bytes_of(tensor) if tensor is not None else np.zeros(layout.handle_sizes, dtype=np.uint8)
        return StridedPages(spec, layout, memory)


def keyspace_spec(meta: CacheMeta, model_id: str, model_revision: str) -> KeyspaceSpec:
    """Shared with every other engine, unless lightllm's own kernels have quantized the cache.

    raises: GeometryUnsupported for a cache that is not served, saying why.
    """
    name = str(meta.scale_data_type if meta.scale_head_dim else meta.data_type).removeprefix("torch.")
    quantized = bool(meta.scale_head_dim)
    if quantized and meta.scale_head_dim * 8 != meta.head_dim:
        raise GeometryUnsupported(f"{meta.scale_head_dim} scales for rows of {meta.head_dim} elements are not served")
    if name not in _DTYPES or meta.token_page_size < 16:
        raise GeometryUnsupported(
            f"a cache of {name} in pages of {meta.token_page_size} tokens is not served: models with linear attention "
            "and caches in fp8 keep lightllm's own CPU cache"
        )
    mla = meta.num_heads == 1
    if not mla and meta.num_heads % 2:
        raise InvalidRequest(f"num_heads counts K and V heads, got {meta.num_heads}")
    return KeyspaceSpec(
        model_id=model_id,
        model_revision=model_revision,
        groups=(
            KvGroup.mla(meta.layer_num, meta.head_dim)
            if mla
            else KvGroup(layers=meta.layer_num, kv_heads=meta.num_heads // 2, head_dim=meta.head_dim),
        ),
        dtype=_DTYPES[name],
        codec=Codec.INT8_GROUP8 if quantized else Codec.RAW,
        chunk_tokens=meta.token_page_size,
        salt=salt_of("lightllm", ["ppl int8 kernels"]) if quantized else b"",
    )


def settings_of_server(variables: Mapping[str, str] = os.environ) -> LightLlmSettings:
    """Of the lightllm server that this process belongs to. raises: InvalidRequest naming what is missing."""
    from lightllm.common.cpu_cache import CpuCacheCreator, CpuCacheTensorSpec
    from lightllm.utils.envs_utils import (
        get_disk_cache_prompt_limit_length,
        get_env_start_args,
        get_unique_server_name,
    )
    from lightllm.utils.kv_cache_utils import calcu_cpu_cache_meta

    try:
        given = json.loads(variables[SETTINGS_VARIABLE])
    except (KeyError, ValueError) as error:
        raise InvalidRequest(
            f"{SETTINGS_VARIABLE} must hold settings as JSON, as in "
            '{"index_endpoints": ["127.0.0.1:7100"], "pagestore": "unix:/run/kvpool/pagestore.sock", '
            f'"model_id": "...", "model_revision": "..."}}: {error}'
        ) from None
    arguments, meta = get_env_start_args(), calcu_cpu_cache_meta()

    def tensor(init: bool) -> Any:
        shape = (
            meta.page_num,
            meta.layer_num,
            meta.token_page_size,
            meta.num_heads,
            meta.get_merged_head_dim(),
        )
        spec = CpuCacheTensorSpec(
            shm_key=arguments.cpu_kv_cache_shm_id, shape=shape, dtype=meta.data_type, size_bytes=meta.calcu_size()
        )
        return CpuCacheCreator(tensor_spec=spec).create_or_attach(init_shm_data=init, pin=not init)

    return LightLlmSettings(
        pool=StoreConfig.of(given),
        meta=meta,
        tensor=tensor,
        socket=given.get("socket") or f"/tmp/kvpool-lightllm-{get_unique_server_name()}.sock",
        model_id=given.get("model_id") or os.path.basename(os.path.normpath(arguments.model_dir)),
        model_revision=given.get("model_revision", "unspecified"),
        keyspace_name=given.get("keyspace_name", ""),
        offload_tokens_min=get_disk_cache_prompt_limit_length(),
        vocabulary=vocabulary_of(arguments.model_dir),
    )


def vocabulary_of(model_dir: str) -> int:
    """Token ids of a model: the largest vocabulary that its config.json names, at most FIRST_IMAGE_TOKEN."""
    try:
        found = list(_vocabularies(json.loads((Path(model_dir) / "config.json").read_text())))
    except (OSError, ValueError):
        found = []
    return min(max(found, default=FIRST_IMAGE_TOKEN), FIRST_IMAGE_TOKEN)


def _vocabularies(config: Any) -> Iterator[int]:
    if isinstance(config, dict):
        if isinstance(config.get("vocab_size"), int):
            yield config["vocab_size"]
        for part in config.values():
            yield from _vocabularies(part)
