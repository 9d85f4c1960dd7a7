"""What kvpool must know of a Hugging Face causal LM: its KV geometry and its identity, or why it cannot be served."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvpool.client.checkpoint import (
    NOT_COMPUTED,
    has_a_row_a_token,
    read_config,
    read_header,
    row_heads,
    tensor_windows,
    weights_digest,
)
from kvpool.connectors.checkpoints import checkpoint_place
from kvpool.connectors.transformers_caches import growing_cache
from kvpool.core.errors import GeometryUnsupported
from kvpool.core.keyspace import Dtype, KvGroup
from kvpool.core.model import ENGINE_CHUNK_TOKENS, Model, family_name

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# With these the rotation of a key depends on the length of the whole prompt, so equal prefixes have unequal KV.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_FULL, _WINDOWED = "full attention", "sliding-window attention"  # kinds of layers that are served, also side by side
# Element types of safetensors that torch has, too.
_STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def shared_model(
    model: PreTrainedModel,
    *,
    model_id: str | None = None,
    model_revision: str | None = None,
    chunk_tokens: int = ENGINE_CHUNK_TOKENS,
    salt: str | bytes = "",
) -> Model:
    """The model as all engines describe it. Computes one token to see that the cache is what the config says.

    model_id: by default the kind of model, with a model_revision the name or path that it was loaded from.
    model_revision: by default a digest of its checkpoint's files, or of its weights in memory if they are not those.

    raises: GeometryUnsupported naming the model and what it has that cannot be shared; InvalidRequest naming a bad
    chunk_tokens, model_id, model_revision or salt.
    """
    what = unsupported(model)
    if what is not None:
        raise _refused(model, what)
    group = geometry_of(model)
    files = checkpoint_of(model)
    config = model.config.get_text_config(decoder=True).to_dict()
    stored = read_config(files) if files is not None else {}
    quantization = config.get("quantization_config") if "quantization_config" not in stored else None
    return Model(
        # A revision that was given may be that of another model of this kind, too.
        model_id or (model_revision and str(getattr(model.config, "_name_or_path", ""))) or family_name(config),
        model_revision or (weights_digest(files) if files is not None else None) or memory_digest(model),
        layers=group.layers,
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        dtype=_probe(model, group),
        chunk_tokens=chunk_tokens,
        rope=config,
        quantization=json.dumps(quantization, sort_keys=True, default=str) if quantization else None,
        variant=_override_parts(model, files),
        salt=salt,
    )


def checkpoint_of(model: PreTrainedModel) -> Path | None:
    """The files that a model was loaded from, if its weights in memory are still theirs, as far as samples say."""
    place = checkpoint_place(
        str(getattr(model.config, "_name_or_path", "")), getattr(model.config, "_commit_hash", None)
    )
    if place is None or not place.is_dir() or getattr(model, "_hf_peft_config_loaded", False):
        return None
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        return None  # adapters that were put in place: their base layers still have the weights of the files
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    compared = 0
    for path in sorted(place.glob("*.safetensors")):
        with path.open("rb") as file:
            header, base = read_header(file)
            for name, described in header.items():
                tensor = tensors.get(name)
                if tensor is None or list(tensor.shape) != described["shape"] or described["dtype"] not in _STORED:
                    continue  # renamed, or in another form: what is compared has to do
                if not _agrees(file, base, name, described, tensor):
                    return None
                compared += 1
    return place if compared else None


def _agrees(file: BinaryIO, base: int, name: str, described: Mapping[str, Any], tensor: torch.Tensor) -> bool:
    """Whether a tensor has what the file has of it, in all of its windows."""
    import torch

    stored = getattr(torch, _STORED[described["dtype"]])
    begin, end = described["data_offsets"]
    flat = tensor.detach().reshape(-1)
    for window in tensor_windows(end - begin):
        file.seek(base + begin + window.start)
        theirs = torch.frombuffer(bytearray(file.read(len(window))), dtype=stored).to(tensor.dtype)
        first = window.start // stored.itemsize
        if not torch.equal(flat[first : first + len(theirs)].cpu(), theirs):
            return False
    if has_a_row_a_token(name, described["shape"]):
        heads = bytearray(row_heads(file, base + begin, len(tensor), end - begin))
        rows = torch.frombuffer(heads, dtype=stored).reshape(len(tensor), -1).to(tensor.dtype)
        return torch.equal(tensor.detach()[:, : rows.shape[1]].cpu(), rows)
    return True


def _override_parts(model: PreTrainedModel, files: Path | None) -> list[Any]:
    """What of the config is not as in the checkpoint, rotary embeddings aside: those are part of the model."""
    if files is None:
        return []
    stored = type(model.config).from_pretrained(files).get_text_config(decoder=True).to_dict()
    now = model.config.get_text_config(decoder=True).to_dict()
    left_out = (*NOT_COMPUTED, "quantization_config")
    overrides = {key: value for key, value in now.items() if key not in left_out and stored.get(key) != value}
    return [{"overrides": overrides}] if overrides else []


def unsupported(model: PreTrainedModel) -> str | None:
    """What the model has that makes its KV more than rows of one geometry that only the prefix decides, or None."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        return "an encoder beside its decoder"
    if getattr(config, "attention_chunk_size", None):
        return f"chunked local attention (chunks of {config.attention_chunk_size} tokens)"
    kinds = _layer_kinds(config)
    if not all(kind == _FULL or kind.startswith(_WINDOWED) for kind in kinds):
        return kinds[0] if len(kinds) == 1 else f"layers of {len(kinds)} kinds ({', '.join(kinds)}): a hybrid model"
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
    return list(dict.fromkeys(_kind_of(layer) for layer in layers)) or [_FULL]


def _kind_of(layer: Any) -> str:
    name = type(layer).__name__
    if name == "DynamicLayer":
        return _FULL
    if name == "DynamicSlidingWindowLayer":
        return f"{_WINDOWED} (window of {layer.sliding_window} tokens)"
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

    cache = growing_cache(model)
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


def memory_digest(model: PreTrainedModel) -> str:
    """32 hex digits over weights, buffers and config in memory: equal only for models that compute the same.

    Reads all weights once (about a second per GB). Weights that are changed later, by adapters too, are not seen.
    """
    import torch

    hasher = hashlib.blake2b(digest_size=16)
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in NOT_COMPUTED}
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
