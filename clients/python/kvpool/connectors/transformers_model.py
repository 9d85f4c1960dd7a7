"""What kvpool must know of a Hugging Face causal LM: its KV geometry and its identity, or why it cannot be served."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpool.core.errors import GeometryUnsupported
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# With these the rotation of a key depends on the length of the whole prompt, so equal prefixes have unequal KV.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Of a config: where it came from, not what it computes.
_PROVENANCE = ("_name_or_path", "_commit_hash", "transformers_version", "architectures", "dtype", "torch_dtype")


def keyspace_spec(
    model: PreTrainedModel, *, model_id: str, model_revision: str, chunk_tokens: int, salt: bytes = b""
) -> KeyspaceSpec:
    """The keyspace of a model's KV. Computes one token to see that the cache is what the config says.

    raises: GeometryUnsupported naming the model and what it has that cannot be shared; InvalidRequest naming a bad
    chunk_tokens, model_id, model_revision or salt.
    """
    what = unsupported(model)
    if what is not None:
        raise _refused(model, what)
    group = geometry_of(model)
    return KeyspaceSpec(
        model_id=model_id,
        model_revision=model_revision,
        groups=(group,),
        dtype=_probe(model, group),
        chunk_tokens=chunk_tokens,
        salt=salt,
    )


def unsupported(model: PreTrainedModel) -> str | None:
    """What the model has that makes its KV more than rows of one geometry that only the prefix decides, or None."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        return "an encoder beside its decoder"
    kinds = _layer_kinds(config)
    if len(kinds) > 1:
        return f"layers of {len(kinds)} kinds ({', '.join(kinds)}): a hybrid model"
    if kinds != ["full attention"]:
        return kinds[0]
    if getattr(model, "_is_stateful", False):
        return "a recurrent state (state-space or linear-attention layers)"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "local (sliding-window) attention layers"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA), which transformers caches in an expanded form"
    if getattr(config, "use_bidirectional_attention", False):
        return "bidirectional attention"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "layers on several devices"
    return _unsupported_rope(config)


def _layer_kinds(config: Any) -> list[str]:
    """Kinds of layers as transformers itself would cache them, each once, in order of appearance."""
    from transformers import DynamicCache

    layers = DynamicCache(config=config).layers
    return list(dict.fromkeys(_kind_of(layer) for layer in layers)) or ["full attention"]


def _kind_of(layer: Any) -> str:
    name = type(layer).__name__
    if name == "DynamicLayer":
        return "full attention"
    if name == "DynamicSlidingWindowLayer":
        return f"sliding-window attention (window of {layer.sliding_window} tokens)"
    if name.startswith("LinearAttention"):
        return "linear-attention or state-space layers"
    if name == "DummyLayer":
        return "layers without a KV cache of their own"
    return f"layers cached as {name}"


def _unsupported_rope(config: Any) -> str | None:
    parameters = getattr(config, "rope_parameters", None) or {}
    # Either the parameters themselves, or one such dict for each layer type.
    for entry in (parameters, *parameters.values()):
        kind = entry.get("rope_type") if isinstance(entry, dict) else None
        if kind in LENGTH_DEPENDENT_ROPE:
            return f"rotary embeddings that depend on the prompt's length (rope_type {kind})"
    return None


def geometry_of(model: PreTrainedModel) -> KvGroup:
    """The KV group that the config describes. Raises GeometryUnsupported if it gives no single number of heads."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    query_heads, width = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and isinstance(width, int) and isinstance(query_heads, int):
        head_dim = width // query_heads
    if not isinstance(heads, int) or not isinstance(head_dim, int):
        raise _refused(model, f"KV heads that differ by layer or are unknown ({heads!r} heads of {head_dim!r})")
    return KvGroup(layers=config.num_hidden_layers, kv_heads=heads, head_dim=head_dim)


def _probe(model: PreTrainedModel, group: KvGroup) -> Dtype:
    """Element type of the cache after one token. Raises GeometryUnsupported if the cache is not what `group` says."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache)
    filled = [layer for layer in cache.layers if layer.is_initialized]
    if len(filled) != group.layers:
        raise _refused(model, f"{len(filled)} cached layers where its config says {group.layers}")
    wanted, dtype = (1, group.kv_heads, 1, group.head_dim), filled[0].keys.dtype
    for number, layer in enumerate(filled):
        for name, rows in (("keys", layer.keys), ("values", layer.values)):
            if tuple(rows.shape) != wanted or rows.dtype != dtype:
                found = f"{name} of layer {number} in shape {tuple(rows.shape)} and {rows.dtype}"
                raise _refused(model, f"{found} where {wanted} and {dtype} were expected")
    for kvpool_dtype, torch_dtype in torch_dtypes().items():
        if torch_dtype == dtype:
            return kvpool_dtype
    raise _refused(model, f"a KV cache of {dtype}")


def torch_dtypes() -> dict[Dtype, torch.dtype]:
    """Element types that both sides know."""
    import torch

    return {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}


def weights_digest(model: PreTrainedModel) -> str:
    """32 hex digits over weights, buffers and config: equal only for models that compute the same.

    Reads all weights once (about a second per GB). Weights that are changed later, by adapters too, are not seen.
    """
    import torch

    hasher = hashlib.blake2b(digest_size=16)
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in _PROVENANCE}
    hasher.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        hasher.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def model_name(model: PreTrainedModel) -> str:
    """What the model was loaded from, of a directory its name (it lies elsewhere on other hosts), else its type."""
    config = model.config
    source = str(getattr(config, "name_or_path", ""))
    if Path(source).is_absolute():
        source = Path(source).name
    return source or str(getattr(config, "model_type", "")) or type(model).__name__


def _refused(model: PreTrainedModel, what: str) -> GeometryUnsupported:
    return GeometryUnsupported(f"model {model_name(model)} ({type(model).__name__}) has {what}")
