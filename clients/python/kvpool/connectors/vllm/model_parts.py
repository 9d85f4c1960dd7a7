"""What KV depends on beside weights and tokens, as vLLM's configuration says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvpool.client.checkpoint import canonical_config
from kvpool.core.model import ROPE_KEYS, normalized_rope

DRAFTERS_WITHOUT_KV = ("ngram", "ngram_gpu", "medusa", "mlp_speculator", "suffix")
# What vLLM's layers write into the config that they are built from, and what stood there; which models' do.
_BUILT_ROPE_TYPES = {"deepseek_yarn": "yarn", "deepseek_llama_scaling": "yarn"}
_WRITES_TURNED_SHARE = ("bailing", "falcon_h1", "gptj", "minimax")
_OF_A_DEGREE = ("num_kv_heads", "max_tp_shards", "page_size_padded")  # what differs between TP degrees


def kv_kinds(kv_cache_config: Any, *, any_degree: bool) -> list[Any]:
    """Return all that vLLM says of the layers of each KV cache group, for `json.dumps`: the bytes of a block depend on
    it. any_degree: leave out what differs between TP degrees."""
    return [_kind(group.kv_cache_spec, any_degree) for group in kv_cache_config.kv_cache_groups]


def _kind(spec: Any, any_degree: bool) -> Any:
    layers = getattr(spec, "kv_cache_specs", None)  # of layers that differ in size alone
    if layers:
        return {name: _kind(layer, any_degree) for name, layer in layers.items()}
    names = [one.name for one in fields(spec) if not (any_degree and one.name in _OF_A_DEGREE)]
    return [type(spec).__name__, {name: str(getattr(spec, name)) for name in names}]


def model_parts(vllm_config: Any) -> list[Any]:
    """Return what the KV of an engine's model depends on beside its weights and tokens, for `json.dumps`: rotary
    embeddings, overrides of its config, `max_model_len` where it changes KV, element types, quantization made at the
    start, a drafter."""
    model, drafter = vllm_config.model_config, vllm_config.speculative_config
    parts = [normalized_rope(unbuilt_rope(model)), *override_parts(model), *length_parts(model), str(model.dtype)]
    parts += [{"quantization": quantization_at_start(model)}, *weight_parts(vllm_config.load_config)]
    if drafter is not None and drafter.method not in DRAFTERS_WITHOUT_KV:
        parts.append([str(drafter.method), str(getattr(drafter.draft_model_config, "model", ""))])
    return parts


def quantization_at_start(model: Any) -> Any:
    """What a checkpoint is quantized to while it is loaded. One that is quantized says so itself, and its weights are
    its own."""
    return model.quantization if getattr(model.hf_config, "quantization_config", None) is None else None


def weight_parts(load_config: Any) -> list[str]:
    """Whether weights are made up instead of read. load_config: None as that of a drafter which has none of its own."""
    return ["made-up weights"] if load_config is not None and str(load_config.load_format) == "dummy" else []


def unbuilt_rope(model: Any) -> dict[str, Any]:
    """Return a model's config with rotary embeddings as they were before vLLM built the model: a scheduler may live in
    a process that builds none, and has to derive the same keyspace. What a user may have overridden stays."""
    config: dict[str, Any] = model.hf_text_config.to_dict()
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or _may_override_rope(model.hf_overrides):
        return config
    family = str(config.get("model_type", ""))
    is_deepseek = bool(getattr(model, "use_mla", False)) or family.startswith("deepseek")
    rotary_dim = config.get("attn_rotary_emb" if family == "falcon_h1" else "rotary_dim")
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_dim = config.get("head_dim") or (width // heads if width and heads else 0)
    turned = rotary_dim / head_dim if rotary_dim and head_dim and family.startswith(_WRITES_TURNED_SHARE) else None

    def unbuilt(rope: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: unbuilt(value) if isinstance(value, Mapping) else value for key, value in rope.items()}
        if is_deepseek and "rope_type" in given:
            given["rope_type"] = _BUILT_ROPE_TYPES.get(str(given["rope_type"]), given["rope_type"])
        if turned is not None and given.get("partial_rotary_factor") == turned:
            del given["partial_rotary_factor"]
        return given

    return {**config, "rope_parameters": unbuilt(rope)}


def _may_override_rope(overrides: Any) -> bool:
    """Whether a user's overrides of a config name rotary embeddings, or are a function, which may do anything."""
    if isinstance(overrides, Mapping):
        return any(key in ROPE_KEYS or _may_override_rope(value) for key, value in overrides.items())
    return callable(overrides) and not is_vllms_own(overrides)


def is_vllms_own(overrides: Any) -> bool:
    """Whether a function of overrides is what vLLM gives every drafter, with none of the user's within."""
    function = getattr(overrides, "func", overrides)
    users = (*getattr(overrides, "args", ()), *getattr(overrides, "keywords", {}).values())
    return str(getattr(function, "__module__", "")).partition(".")[0] == "vllm" and not any(map(callable, users))


def override_parts(model: Any) -> list[Any]:
    """Rotary embeddings aside: those are part of the model."""
    overrides = model.hf_overrides
    if isinstance(overrides, Mapping):
        overrides = {key: value for key, value in overrides.items() if key not in ROPE_KEYS}
        return [{"overrides": overrides}] if overrides else []
    if not overrides:
        return []
    changed = getattr(model.hf_config, "to_dict", model.hf_text_config.to_dict)()  # a name says little of a function
    return [{"overrides": getattr(overrides, "__qualname__", ""), "to": canonical_config(changed).decode()}]


def length_parts(model: Any) -> list[str]:
    """What the rotary embeddings take from `max_model_len`, normalized; nothing for most kinds of them."""
    ropes = getattr(model.hf_text_config, "rope_parameters", None) or {}
    if "rope_type" not in ropes and "rope_theta" not in ropes:
        ropes = [rope for rope in ropes.values() if isinstance(rope, dict)]  # one for each kind of layer
    else:
        ropes = [ropes]
    return [part for rope in ropes for part in _length_part(model, rope)]


def _length_part(model: Any, rope: dict[str, Any]) -> list[str]:
    kind, limit = rope.get("rope_type"), None
    if kind == "longrope":  # short or long factors for all tokens, by the engine's limit
        limit = rope.get("original_max_position_embeddings") or getattr(
            model.hf_text_config, "original_max_position_embeddings", None
        )
    elif not (
        # Some architectures make their tables for max_model_len positions; these kinds choose frequencies by that.
        (kind == "dynamic" and "alpha" not in rope and "max_trained_positions" in rope)
        or (rope.get("use_fope") and rope.get("num_inv_freq") is None)
    ):
        return []
    if getattr(model, "original_max_model_len", None) == -1:
        # The model was built before vLLM fitted the length to the memory. What it was then follows from the config.
        return ["length fitted"]
    if limit is not None:
        return ["long" if model.max_model_len > limit else "short"]
    return [f"length {model.max_model_len}"]
