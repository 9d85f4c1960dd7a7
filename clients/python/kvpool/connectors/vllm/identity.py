"""Derives the keyspace of a vLLM engine's KV, and the part of it that each rank has.

Everything is read from vLLM's configuration, so that the scheduler, which has no tensors, derives the same keyspace as
the workers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpool.connectors.checkpoints import weights_revision
from kvpool.connectors.vllm.joined_groups import join_groups
from kvpool.connectors.vllm.model_parts import (
    DRAFTERS_WITHOUT_KV,
    is_vllms_own,
    length_parts,
    override_parts,
    quantization_at_start,
    unbuilt_rope,
    weight_parts,
)
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.core.errors import GeometryUnsupported, InvalidRequest, PartitionRefused
from kvpool.core.geometry import AttentionKind, OpaqueLayout
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import Dtype, KeyspaceSpec
from kvpool.core.model import Model, default_keyspace_name, family_name, normalized_rope
from kvpool.core.partition import RankPart, rank_part

_FP8_NAMES = {"auto": "fp8_e4m3", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
_DTYPES = {
    "bfloat16": Dtype.BF16,
    "float16": Dtype.FP16,
    "float32": Dtype.FP32,
    "fp8_e4m3": Dtype.FP8_E4M3,
    "fp8_e5m2": Dtype.FP8_E5M2,
}
_DRAFTERS = ("eagle", "eagle3", "mtp")
_RECURRENT = "MambaSpec"  # vLLM's name for all recurrent state: Mamba, gated delta nets, short convolutions, ...
_CHUNK_TOKENS_MAX = 4096
_FP8_PER_TENSOR = 1  # of vLLM's KVQuantMode; 0: not quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheInfo:
    """One of the engine's KV cache groups, or several equal ones, whose blocks lie over each other.

    head_count: heads of one rank. opaque: blocks cannot be split into rows. state: for recurrent layers, how the bytes
    of a block, which is one row, are arranged; empty for attention.
    """

    block_tokens: int
    head_count: int
    row_bytes: int  # of one token and head, K and V together; MLA: of the latent
    opaque: bool
    dtype: str
    isa: str = ""
    draft_layers: int = 0  # of a drafter that keeps KV of its own, behind the model's
    volatile_tokens: int = 0  # at the end of what is computed: the drafter's KV of them may be written again
    window_tokens: int = 0  # that a token attends to, its own included; 0: all before it
    layer_numbers: tuple[int, ...] = ()  # of the model, each member's ascending; empty: all of them are in this group
    state: str = ""
    members: tuple[int, ...] = (0,)  # their numbers in vLLM's order


def kv_cache_infos(vllm_config: Any, kv_cache_config: Any) -> tuple[KvCacheInfo, ...]:
    """Return the KV cache groups in vLLM's order, equal ones as one.

    raises: GeometryUnsupported naming what cannot be shared.
    """
    groups = kv_cache_config.kv_cache_groups
    recurrent = [group.kv_cache_spec for group in groups if type(group.kv_cache_spec).__name__ == _RECURRENT]
    if recurrent:
        _check_recurrent(vllm_config, groups, recurrent)
    if len(groups) == 1:
        draft_layers = _draft_layers(vllm_config, groups[0])
        return (_group_info(vllm_config, groups[0], draft_layers=draft_layers),)
    return join_groups(_infos_of_groups(vllm_config, groups), kv_cache_config)


def _infos_of_groups(vllm_config: Any, groups: Sequence[Any]) -> tuple[KvCacheInfo, ...]:
    from vllm.model_executor.models.utils import extract_layer_index

    model, drafter = vllm_config.model_config, getattr(vllm_config, "speculative_config", None)
    if drafter is not None and drafter.method not in DRAFTERS_WITHOUT_KV:
        raise GeometryUnsupported(f"the engine has {len(groups)} KV cache groups and a drafter with KV; not served")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise GeometryUnsupported(f"the engine has {len(groups)} KV cache groups and a pipeline; not served")
    found: list[KvCacheInfo] = []
    for group in groups:
        spec, kind = group.kv_cache_spec, type(group.kv_cache_spec).__name__
        numbers = tuple(sorted(extract_layer_index(name) for name in group.layer_names))
        members = (len(found),)
        if kind == _RECURRENT:
            found.append(replace(_group_info(vllm_config, group), layer_numbers=numbers, members=members))
            continue
        if kind not in ("FullAttentionSpec", "SlidingWindowSpec"):
            raise GeometryUnsupported(
                f"one of the engine's {len(groups)} KV cache groups is of {kind}; full attention, sliding windows and "
                f"recurrent state are served"
            )
        heads = max(1, model.get_total_num_kv_heads() // vllm_config.parallel_config.tensor_parallel_size)
        shape, expected = (spec.num_kv_heads, spec.head_size), (heads, model.get_head_size())
        if shape != expected or getattr(spec, "page_size_padded", None) is not None:
            raise GeometryUnsupported(
                f"layers of {kind} have {shape[0]} KV heads x {shape[1]} elements, others of the model {expected[0]} x "
                f"{expected[1]}; equal ones are served"
            )
        found.append(replace(_group_info(vllm_config, group), layer_numbers=numbers, members=members))
    numbers = tuple(sorted(number for info in found for number in info.layer_numbers))
    if any(info.state for info in found):
        return tuple(found)  # of such models layers may have attention and a state, or neither
    if numbers != tuple(range(model.get_total_num_hidden_layers())):
        raise GeometryUnsupported(
            f"{len(numbers)} layers have KV of their own, the model has {model.get_total_num_hidden_layers()}: layers "
            f"without or with KV of others are not served"
        )
    return tuple(found)


def _group_info(vllm_config: Any, group: Any, *, draft_layers: int = 0) -> KvCacheInfo:
    spec = group.kv_cache_spec
    kind = type(spec).__name__
    if kind == _RECURRENT:
        return _state_info(vllm_config, spec)
    if kind == "UniformTypeKVCacheSpecs":
        shapes = sorted({_shape(layer) for layer in spec.kv_cache_specs.values()})
        raise GeometryUnsupported(
            f"layers of one KV cache group keep unequal KV ({', '.join(shapes)}), as those of a sparse-attention "
            f"indexer do: equal ones are served"
        )
    if kind not in ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"):
        raise GeometryUnsupported(
            f"the engine's KV cache is of {kind}; full attention, MLA, sliding windows and recurrent state are served"
        )
    # With its hybrid manager disabled vLLM keeps KV of all tokens for layers with a window, too, as for full attention.
    window_tokens = int(spec.sliding_window) if kind == "SlidingWindowSpec" else 0
    if window_tokens and (draft_layers or getattr(spec, "extra_retained_tokens", 0)):
        raise GeometryUnsupported("a drafter with KV beside sliding windows is not served")
    if getattr(spec, "attention_chunk_size", None):
        raise GeometryUnsupported("the engine has chunked local attention; full attention and sliding windows are")
    if getattr(spec, "non_causal", False):
        raise GeometryUnsupported("the engine's tokens attend to later ones: equal prefixes have unequal KV")
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise GeometryUnsupported("context parallelism spreads a block's tokens over ranks; it is not served")
    _check_rows(spec)
    dtype = _element_type(spec, vllm_config.cache_config)
    on_cpu = not on_gpu(vllm_config)
    block_bytes = spec.page_size_bytes
    heads = spec.num_kv_heads
    if block_bytes % (heads * spec.block_size):
        raise GeometryUnsupported(f"blocks of {block_bytes} bytes are no rows of {heads} heads x {spec.block_size}")
    isa = ""
    if on_cpu:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        # Kernels of the type that is computed in also arrange a cache in fp8.
        isa = _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size)
    return KvCacheInfo(
        block_tokens=spec.block_size,
        head_count=heads,
        row_bytes=block_bytes // (heads * spec.block_size),
        opaque=on_cpu,
        dtype=dtype,
        isa=isa,
        draft_layers=draft_layers,
        volatile_tokens=_volatile_tokens(vllm_config) if draft_layers else 0,
        window_tokens=window_tokens,
    )


def _shape(spec: Any) -> str:
    heads, elements = getattr(spec, "num_kv_heads", "?"), getattr(spec, "head_size", "?")
    return f"{type(spec).__name__} {heads} x {elements} {str(getattr(spec, 'dtype', '?')).removeprefix('torch.')}"


def on_gpu(vllm_config: Any) -> bool:
    """Whether the engine's memory is a GPU's. raises: GeometryUnsupported unless it is on a GPU or the host."""
    import torch

    device = torch.device(vllm_config.device_config.device_type).type
    if device not in ("cpu", "cuda"):
        raise GeometryUnsupported(f"the engine runs on {device}; CPUs and NVIDIA GPUs are served")
    return device == "cuda"


def _check_recurrent(vllm_config: Any, groups: Sequence[Any], recurrent: Sequence[Any]) -> None:
    """Check that vLLM keeps recurrent state at chunk boundaries and reports its blocks.

    raises: GeometryUnsupported naming what prevents that.
    """
    from vllm.v1.core.sched import output

    block_tokens, mode = recurrent[0].block_size, recurrent[0].mamba_cache_mode
    if mode != "align":
        raise GeometryUnsupported(
            f"vLLM keeps no checkpoints of recurrent state in mamba_cache_mode {mode!r}; start with "
            f"--enable-prefix-caching"
        )
    block_state = getattr(output, "KVConnectorBlockState", None)
    if "boundary_state_offloads" not in getattr(block_state, "__annotations__", ()):
        raise GeometryUnsupported("this vLLM does not name the blocks of its checkpoints of recurrent state")
    if vllm_config.speculative_config is not None:
        raise GeometryUnsupported("speculative decoding beside recurrent state is not served")
    if _has_addresses_of_states(vllm_config):
        raise GeometryUnsupported(
            "recurrent state on a CPU is not served with vLLM's model runner V2; start with VLLM_USE_V2_MODEL_RUNNER=0"
        )
    unit = getattr(vllm_config.cache_config, "prefix_match_unit", None)
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if sizes != {block_tokens} or unit not in (None, block_tokens):
        raise GeometryUnsupported(
            f"recurrent state beside blocks of {sorted(sizes)} tokens, matched by {unit or min(sizes)}, is not served: "
            f"vLLM copies states inside of blocks then; start with one --block-size, and without --prefix-match-unit"
        )
    if block_tokens & (block_tokens - 1) or block_tokens > _CHUNK_TOKENS_MAX:
        raise GeometryUnsupported(
            f"vLLM keeps recurrent state after each {block_tokens} tokens, and chunks have a power of two of them, at "
            f"most {_CHUNK_TOKENS_MAX}; start with --block-size {1 << (block_tokens - 1).bit_length()}"
        )


def _has_addresses_of_states(vllm_config: Any) -> bool:
    """Whether vLLM captures addresses of recurrent state before it registers the KV cache, which moves on a CPU."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False)) and not on_gpu(vllm_config)


def recurrent_block_tokens(kv_cache_config: Any) -> int:
    """Return the tokens between two checkpoints of recurrent state; 0 for models without any."""
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    specs = [group.kv_cache_spec for group in groups]
    return next((int(spec.block_size) for spec in specs if type(spec).__name__ == _RECURRENT), 0)


def _state_info(vllm_config: Any, spec: Any) -> KvCacheInfo:
    """Kernels arrange states as they like: the bytes are valid only for engines with the same kernels."""
    types = [str(dtype).removeprefix("torch.") for dtype in spec.dtypes]
    if types[-1] not in _DTYPES:
        raise GeometryUnsupported(f"the engine's recurrent state is of {types[-1]}; {', '.join(_DTYPES)} are served")
    device, isa = "cuda", ""
    if not on_gpu(vllm_config):
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        device, isa = "cpu", _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, None)
    parts = (f"{kind} {'x'.join(map(str, shape))}" for kind, shape in zip(types, spec.shapes, strict=True))
    return KvCacheInfo(
        block_tokens=spec.block_size,
        head_count=1,
        row_bytes=int(spec.state_content_size_bytes),
        opaque=True,
        dtype=types[-1],
        isa=isa,
        state=" ".join([getattr(spec.mamba_type, "name", str(spec.mamba_type)).lower(), device, *parts]),
    )


def _draft_layers(vllm_config: Any, group: Any) -> int:
    """Return the number of drafter layers in the model's own KV cache group, where they have the model's shape.

    raises: GeometryUnsupported for a drafter whose KV has another shape.
    """
    drafter = getattr(vllm_config, "speculative_config", None)
    if drafter is None or drafter.method in DRAFTERS_WITHOUT_KV:
        return 0
    if drafter.method not in _DRAFTERS:
        raise GeometryUnsupported(
            f"drafters of method {drafter.method} are not served; {', '.join((*_DRAFTERS, *DRAFTERS_WITHOUT_KV))} are"
        )
    model = vllm_config.model_config
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise GeometryUnsupported("a drafter beside pipeline parallelism is not served; only the last stage has its KV")
    draft_layers = len(group.layer_names) - int(model.get_total_num_hidden_layers())
    if draft_layers < 0:
        raise GeometryUnsupported(
            f"{len(group.layer_names)} layers have KV, the model and its drafter more than "
            f"{model.get_total_num_hidden_layers()}"
        )
    ours, its = _head_shape(model), _head_shape(drafter.draft_model_config)
    if draft_layers and ours != its:  # the scheduler is shown one of several shapes; of a rank they may look alike
        raise GeometryUnsupported(
            f"the drafter has {its[0]} KV heads x {its[1]} elements, the model {ours[0]} x {ours[1]}; drafters with "
            f"those of the model are served"
        )
    return draft_layers


def _head_shape(model: Any) -> tuple[int, int]:
    return 1 if model.use_mla else int(model.get_total_num_kv_heads()), int(model.get_head_size())


def _volatile_tokens(vllm_config: Any) -> int:
    """A drafter computes a token's KV from the tokens after it, some of which it may have to guess."""
    return max(1, int(vllm_config.num_prefill_lookahead_tokens))


def layer_order(kv_caches: Collection[str], group: Any, layer_count: int, draft_layers: int) -> list[str]:
    """Return the names of a rank's layers in order, drafter layers last.

    group: of the rank's KV cache. layer_count: including drafter layers. raises: GeometryUnsupported if names do not
    correspond to layers one to one.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    # A drafter's layers may be numbered behind the model's or from 0 on: vLLM lists them in the order of their making.
    names = [name for name in group.layer_names if name in kv_caches] if draft_layers else list(kv_caches)
    own = layer_count - draft_layers
    numbers = {extract_layer_index(name) for name in names[:own]}
    if len(names) != layer_count or len(kv_caches) != layer_count or len(numbers) != own:
        raise GeometryUnsupported(
            f"the engine has {len(kv_caches)} KV tensors in {len(numbers)} layers, {layer_count} were expected"
        )
    return sorted(names[:own], key=extract_layer_index) + names[own:]


def _element_type(spec: Any, cache: Any) -> str:
    """A name of _DTYPES. raises: GeometryUnsupported.

    Elements in fp8 have one scale a tensor, of the checkpoint or 1.0, so the same bytes mean the same to all engines of
    a keyspace. Other quantized caches have scales that each engine computes.
    """
    name, quantized = str(spec.dtype).removeprefix("torch."), int(getattr(spec, "kv_quant_mode", 0))
    asked = str(getattr(spec, "cache_dtype_str", None) or cache.cache_dtype)
    if getattr(cache, "calculate_kv_scales", False):
        raise GeometryUnsupported(
            "calculate_kv_scales has each engine find scales of its own for its KV cache; start without it"
        )
    if not quantized and name in _DTYPES:
        return name
    if quantized == _FP8_PER_TENSOR and asked in _FP8_NAMES:
        return _FP8_NAMES[asked]
    raise GeometryUnsupported(
        f"the engine's KV cache is of {asked if quantized else name}; {', '.join(_DTYPES)} are served"
    )


def _check_rows(spec: Any) -> None:
    """Some backends pack K and V in other ways than V right behind K for each token and head. With two KV heads, two
    slots for K and V of all heads make tensors of the very same shape. raises: GeometryUnsupported.
    """
    slots, states = getattr(spec, "num_head_slots", None), getattr(spec, "tokens_per_state", 1)
    if slots is not None or states != 1:
        raise GeometryUnsupported(
            f"the attention backend packs K and V in a way of its own ({slots} slots for {spec.num_kv_heads} KV heads, "
            f"{states} tokens in a state); choose another --attention-backend"
        )
    if spec.head_size_v not in (0, spec.head_size):  # 0: MLA
        raise GeometryUnsupported(f"K has {spec.head_size} elements and V {spec.head_size_v}; equal ones are served")


def model_spec(
    settings: VllmSettings, vllm_config: Any, info: KvCacheInfo, *, read_weights: bool = True
) -> KeyspaceSpec:
    """Return the keyspace of the engine's KV. May read samples of the weights; without them only its geometry is valid.

    raises: InvalidRequest, GeometryUnsupported.
    """
    import vllm

    model = vllm_config.model_config
    if info.state and settings.chunk_tokens != info.block_tokens:
        raise InvalidRequest(
            f"chunk_tokens {settings.chunk_tokens} is not {info.block_tokens}, the tokens between two of the engine's "
            f"checkpoints of recurrent state; leave chunk_tokens out of kv_connector_extra_config"
        )
    if settings.chunk_tokens % info.block_tokens:
        raise InvalidRequest(
            f"chunk_tokens {settings.chunk_tokens} is no multiple of the engine's block size {info.block_tokens}; "
            f"set chunk_tokens in kv_connector_extra_config"
        )
    opaque = None
    if info.state:
        opaque = OpaqueLayout(
            engine="vllm",
            layout_id=f"{info.state} {vllm.__version__}",
            isa=info.isa,
            block_tokens=info.block_tokens,
            cell_bytes=info.row_bytes,
        )
    elif info.opaque:
        opaque = OpaqueLayout(
            engine="vllm",
            layout_id=f"cpu_attn {vllm.__version__}",  # the kernels decide it, release by release
            isa=info.isa,
            block_tokens=info.block_tokens,
            cell_bytes=info.row_bytes * info.block_tokens,
        )
    geometry: dict[str, Any]
    if info.state:  # each rank has a part of it, in one piece
        geometry = {"kv_heads": vllm_config.parallel_config.tensor_parallel_size, "head_dim": 1}
    elif model.use_mla:
        geometry = {"latent_dim": info.row_bytes // (_DTYPES[info.dtype].bits // 8)}
    else:
        geometry = {"kv_heads": model.get_total_num_kv_heads(), "head_dim": model.get_head_size()}
    config = model.hf_text_config.to_dict()
    spec = Model(
        # A revision that was given may be that of another model of this kind, too.
        settings.model_id or (str(model.model) if settings.model_revision else family_name(config)),
        settings.model_revision or (model_revision(model) if read_weights else "not read"),
        layers=len(info.layer_numbers) // len(info.members) or model.get_total_num_hidden_layers() + info.draft_layers,
        window_tokens=info.window_tokens,
        dtype=_DTYPES[info.dtype],
        chunk_tokens=settings.chunk_tokens,
        rope=unbuilt_rope(model),
        quantization=quantization_at_start(model),
        variant=_variant(vllm_config, info) if read_weights else (),
        salt=settings.salt,
        opaque=opaque,
        **geometry,
    ).spec
    attention = spec.group.attention
    if info.state:
        attention = AttentionKind.STATE_SPACE
    elif info.window_tokens and info.layer_numbers:
        attention = AttentionKind.GROUPED_WINDOW
    return replace(spec, groups=(replace(spec.group, attention=attention, pages=len(info.members)),))


def model_revision(model: Any) -> str:
    """Return a digest of the weights, or the hub's commit. raises: InvalidRequest if there is neither."""
    revision = weights_revision(str(model.model), getattr(model.hf_config, "_commit_hash", None))
    if revision is None:
        raise InvalidRequest(
            f"the weights of {model.model!r} cannot be identified: neither its files nor a commit is known; "
            f"name them with model_revision in kv_connector_extra_config"
        )
    return revision


def _variant(vllm_config: Any, info: KvCacheInfo) -> list[Any]:
    """Whatever else the KV depends on: what was overridden of the config, in which type it is computed, and whether the
    weights are real ones; the same of a drafter that has KV; which of the model's layers have it. Empty for a
    checkpoint with one KV cache group that is served as it is."""
    model = vllm_config.model_config
    parts: list[Any] = [*override_parts(model), *_computed_in(model, info), *length_parts(model)]
    parts += weight_parts(vllm_config.load_config)
    if info.layer_numbers:
        parts.append({"layers": info.layer_numbers})
    if info.draft_layers:
        parts.append(_drafter_parts(vllm_config.speculative_config, model))
    return parts


def _computed_in(model: Any, info: KvCacheInfo) -> list[str]:
    computed = str(model.dtype).removeprefix("torch.")
    return [f"computed in {computed}"] if computed != info.dtype else []


def _drafter_parts(drafter: Any, model: Any) -> list[Any]:
    """raises: InvalidRequest if it cannot be said which weights the drafter has."""
    draft = drafter.draft_model_config
    try:  # heads may be part of the model's own weights
        revision = "" if str(draft.model) == str(model.model) else model_revision(draft)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"it cannot be said which weights the drafter {draft.model!r} has; name it as on the hub or as a directory"
        ) from error
    chained = int(drafter.num_speculative_tokens) if drafter.use_multi_module_mtp() else 0  # layers that are computed
    rope = normalized_rope(unbuilt_rope(draft))
    described = [str(draft.dtype), draft.quantization, *_draft_override_parts(draft), rope, *length_parts(draft)]
    parts = [drafter.method, revision, chained, *described]
    return [*parts, *weight_parts(getattr(drafter, "draft_load_config", None))]


def _draft_override_parts(draft: Any) -> list[Any]:
    """vLLM changes every drafter's config itself, and again when it builds the drafter, which a scheduler may not see:
    what it starts from belongs to the drafter's revision."""
    return [] if callable(draft.hf_overrides) and is_vllms_own(draft.hf_overrides) else override_parts(draft)


def part_of_rank(spec: KeyspaceSpec, vllm_config: Any, rank: int) -> RankPart:
    """Return the layers and heads of the worker with this number among all workers of the engine."""
    parallel = vllm_config.parallel_config
    tp_size = parallel.tensor_parallel_size
    pp_rank, tp_rank = divmod(rank, tp_size)
    stages = None
    if parallel.pipeline_parallel_size > 1:
        from vllm.distributed.utils import get_pp_indices

        borders = [
            get_pp_indices(spec.group.layers, stage, parallel.pipeline_parallel_size)
            for stage in range(parallel.pipeline_parallel_size)
        ]
        stages = [end - start for start, end in borders]
    return rank_part(spec.group, tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_layers=stages)


def check_ranks(spec: KeyspaceSpec, vllm_config: Any) -> None:
    """raises: PartitionRefused, naming grid and degrees, if pages cannot be divided among the ranks."""
    parallel, grid = vllm_config.parallel_config, ShardGrid.of(spec)
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    for rank in range(tp_size * pp_size):
        try:
            part = part_of_rank(spec, vllm_config, rank)
            grid.bitmap_for(part.layers, part.heads)
        except PartitionRefused as error:
            raise PartitionRefused(
                f"{tp_size} TP ranks x {pp_size} pipeline stages are not served: {error.message}; choose other degrees"
            ) from error


def keyspace_name(settings: VllmSettings, spec: KeyspaceSpec, info: KvCacheInfo) -> str:
    """Return the name that operators see.

    With several KV cache groups the number of a group's first layer is appended, and how many of vLLM's groups it has
    if there are several; for recurrent state also a digest of its arrangement, as only engines with the same one share
    it.
    """
    name = settings.keyspace_name or default_keyspace_name(spec)
    first_layer = str(info.layer_numbers[0] if info.layer_numbers else 0)
    if len(info.members) > 1:
        first_layer += f"x{len(info.members)}"
    if info.state:
        arranged = hashlib.blake2b(f"{spec.opaque} {spec.group}".encode(), digest_size=4).hexdigest()
        return f"{name}-state{first_layer}-{arranged}"
    return f"{name}-layer{first_layer}" if info.layer_numbers else name
