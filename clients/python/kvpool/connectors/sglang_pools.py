"""SGLang's host pools as layout data, and the keyspace that their pages belong to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType
from typing import Any, Protocol

from kvpool.client.store_values import KeyspaceShards
from kvpool.connectors.strided_pages import Bytes, StridedPages, bytes_of
from kvpool.core.cache_axes import CacheAxes
from kvpool.core.errors import GeometryUnsupported, InvalidRequest, PartitionRefused
from kvpool.core.external_keys import salt_of
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup

_log = logging.getLogger(__name__)
PAGE_KEY_RULE = "sha256 pages of a namespace"
# By the name that SGLang gives a host layout. MLA has neither planes nor heads, so its axes are the same.
HOST_LAYOUTS: Mapping[str, CacheAxes] = MappingProxyType(
    {
        "layer_first": CacheAxes(axes=("plane", "layer", "block", "token", "head")),
        "page_first": CacheAxes(axes=("plane", "block", "token", "layer", "head")),
        "page_first_direct": CacheAxes(axes=("plane", "block", "layer", "token", "head")),
        "page_head": CacheAxes(axes=("plane", "block", "head", "token", "layer")),
    }
)
# Others, those that inherit from them included, keep scales or indexes beside kv_buffer, or other layers on each rank.
HOST_POOLS = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")
_DTYPES = {
    "bfloat16": Dtype.BF16,
    "float16": Dtype.FP16,
    "float32": Dtype.FP32,
    "float8_e4m3fn": Dtype.FP8_E4M3,
    "float8_e5m2": Dtype.FP8_E5M2,
    "int8": Dtype.INT8,
    "uint8": Dtype.INT8,  # elements of 8 bits that SGLang stores without a type: see `kv_identity`
}
# Where SGLang's releases have the arguments of their server, of which KV depends on these.
_ARGUMENTS_OF = (
    ("sglang.srt.runtime_context", "get_server_args"),
    ("sglang.srt.server_args", "get_global_server_args"),
)
_ARGUMENTS = ("quantization", "json_model_override_args")


@lru_cache(maxsize=1)
def page_key_rule() -> str:
    """How the SGLang that is installed here hashes pages. Releases that leave a request's LoRA adapter and cache salt
    out never share with those that take them in."""
    try:
        from sglang.srt.mem_cache import utils
    except ImportError:  # not inside SGLang
        return PAGE_KEY_RULE
    if hasattr(utils, "storage_namespace_seed"):
        return PAGE_KEY_RULE
    _log.warning(
        "kvpool: this SGLang leaves LoRA adapters and cache salts out of its page hashes: do not use either with a "
        "HiCache storage backend, or update SGLang"
    )
    return "sha256 pages"


def _server_arguments() -> Any:
    """SGLang's own of this process; None outside of a server."""
    for module, name in _ARGUMENTS_OF:
        try:
            return getattr(import_module(module), name)()
        except (ImportError, AttributeError, RuntimeError, ValueError):
            continue
    return None


def kv_identity(dtype: Any) -> list[str]:
    """What the KV of this server depends on beside the model's revision and what its pools say of themselves.

    dtype: of a pool. raises: GeometryUnsupported if elements of 8 bits may be of any type.
    """
    arguments = _server_arguments()
    parts = [str(getattr(arguments, name, None) or "") for name in _ARGUMENTS]
    if str(dtype).endswith("uint8"):
        element = getattr(arguments, "kv_cache_dtype", None)
        if element is None:
            raise GeometryUnsupported("this SGLang does not say of which type its KV of 8 bits is; use 16 bits")
        parts.append(str(element))
    return parts


class StorageConfig(Protocol):
    """What is used of HiCacheStorageConfig."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    model_name: str | None
    extra_config: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What names the pages of an engine beside their geometry."""

    model_id: str
    model_revision: str
    keyspace_name: str = ""  # empty: derived
    chained: bool = False
    model_layers: int = 0  # 0: those of the pool
    kv_heads: int = 0  # 0: those of the pool, times the TP size


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPages:
    """A host pool whose pages are shared."""

    space: KeyspaceShards
    pages: StridedPages
    page_tokens: int
    flat: FlatPages


@dataclass(frozen=True, slots=True)
class FlatPages:
    """Single pages in tensors of their own, arranged as in the pool."""

    spec: KeyspaceSpec
    axes: CacheAxes
    layers: range
    heads: range

    def of(self, page: Bytes) -> StridedPages:
        """page: [page_bytes] uint8, contiguous. raises: InvalidRequest for one of another size."""
        layout = self.axes.layout(self.spec, self.layers, self.heads, self.spec.chunk_tokens, 1)
        return StridedPages(self.spec, layout, page)


def host_pages(pool: Any, config: StorageConfig, identity: Identity) -> HostPages:
    """Describe a host pool of MHA, GQA or MLA.

    raises: GeometryUnsupported or InvalidRequest for a pool that cannot be served, saying what to change.
    """
    if type(pool).__name__ not in HOST_POOLS:
        raise GeometryUnsupported(
            f"host pools of {type(pool).__name__} are not served, only {' and '.join(HOST_POOLS)}; use another HiCache "
            "storage backend"
        )
    if getattr(pool, "layer_shard_enabled", False):
        raise GeometryUnsupported(
            "layers that are split over ranks are not served; use another HiCache storage backend"
        )
    axes = HOST_LAYOUTS.get(pool.layout)
    if axes is None:
        raise GeometryUnsupported(
            f"host layout {pool.layout!r} is not served; start SGLang with --hicache-mem-layout "
            f"{' or '.join(HOST_LAYOUTS)}"
        )
    if getattr(pool, "dcp_size", 1) != 1:
        raise GeometryUnsupported("decode context parallelism is not served; use another HiCache storage backend")
    memory = bytes_of(pool.kv_buffer)
    refused: PartitionRefused | None = None
    for whole_model in (True, False):
        spec, layers, heads = _geometry(pool, config, identity, whole_model=whole_model)
        layout = axes.layout(spec, layers, heads, pool.page_size, pool.page_num)
        try:
            pages = StridedPages(spec, layout, memory)
        except PartitionRefused as error:
            refused = error  # then each rank's pages are its own
            continue
        return HostPages(
            space=KeyspaceShards.of("sglang", spec, pages.shards, identity.keyspace_name),
            pages=pages,
            page_tokens=pool.page_size,
            flat=FlatPages(spec, axes, layers, heads),
        )
    raise refused or AssertionError("a geometry was refused without a word")


def _geometry(
    pool: Any, config: StorageConfig, identity: Identity, *, whole_model: bool
) -> tuple[KeyspaceSpec, range, range]:
    """The keyspace, and layers and heads of this rank in it. whole_model: shared by all ranks that know all of it."""
    latent = int(getattr(pool, "kv_cache_dim", 0)) if config.is_mla_model else 0
    rank_heads = 1 if latent else int(pool.head_num)
    apart: list[str] = [f"cp {config.attn_cp_rank}/{config.attn_cp_size}"] if config.attn_cp_size > 1 else []
    layers, heads, first_layer, first_head = int(pool.layer_num), rank_heads, 0, 0
    if whole_model and identity.model_layers:
        layers, first_layer = identity.model_layers, int(pool.start_layer or 0)
    elif config.pp_size > 1:
        apart.append(f"pp {config.pp_rank}/{config.pp_size}")
    if not latent and config.tp_size > 1:
        if whole_model:
            heads = identity.kv_heads or rank_heads * config.tp_size
            first_head = config.tp_rank * heads // config.tp_size
        else:
            apart.append(f"tp {config.tp_rank}/{config.tp_size}")
    if first_layer + int(pool.layer_num) > layers:
        raise InvalidRequest(f"model_layers is {layers}, but this rank has layers up to {first_layer + pool.layer_num}")
    spec = KeyspaceSpec(
        model_id=identity.model_id,
        model_revision=identity.model_revision,
        groups=(_group(pool, layers, heads, latent),),
        dtype=_dtype(pool),
        chunk_tokens=_page_tokens(pool),
        salt=salt_of(
            "sglang",
            [
                page_key_rule(),
                identity.chained,
                getattr(pool, "storage_format_tag", None),
                *kv_identity(pool.dtype),
                *apart,
            ],
        ),
    )
    return spec, range(first_layer, first_layer + int(pool.layer_num)), range(first_head, first_head + rank_heads)


def _group(pool: Any, layers: int, heads: int, latent: int) -> KvGroup:
    if latent:
        return KvGroup.mla(layers, latent)
    if getattr(pool, "v_head_dim", pool.head_dim) != pool.head_dim:
        raise GeometryUnsupported(f"K rows of {pool.head_dim} and V rows of {pool.v_head_dim} elements are not served")
    return KvGroup(layers=layers, kv_heads=heads, head_dim=int(pool.head_dim))


def _dtype(pool: Any) -> Dtype:
    name = str(pool.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise GeometryUnsupported(f"KV of type {name} is not served; use {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _page_tokens(pool: Any) -> int:
    tokens = int(pool.page_size)
    if not 16 <= tokens <= 4096 or tokens & (tokens - 1):
        raise InvalidRequest(
            f"pages of {tokens} tokens are not served: start SGLang with --page-size 64 (a power of two, 16 to 4096)"
        )
    return tokens
