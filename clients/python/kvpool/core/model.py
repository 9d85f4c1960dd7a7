"""A model as the pool sees it: everything that its KV depends on, in one form whatever engine computes it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from kvpool.core.elements import Codec, Dtype
from kvpool.core.errors import InvalidRequest
from kvpool.core.geometry import AttentionKind, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.keyspace import KeyspaceSpec

ENGINE_CHUNK_TOKENS = 128
"""Default of all engines: with another one they find nothing of each other. (Unset on the wire means 256.)"""
DTYPES: Mapping[str, Dtype] = MappingProxyType(
    {dtype.name.lower(): dtype for dtype in Dtype}
    | {"bfloat16": Dtype.BF16, "float16": Dtype.FP16, "half": Dtype.FP16, "float32": Dtype.FP32}
)
_NAME_MAX = 128  # characters, of the index
_NAME_MODEL_MAX = 40
_DEFAULT_ROPE_THETA = 10000.0
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
"""Of a model's config: those that `normalized_rope` reads."""
_PLAIN_ROPE_KEYS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_ROPE_ALIASES = {"type": "rope_type", "theta": "rope_theta"}


@dataclass(frozen=True)
class Model:
    """Whose KV it is. Two engines share exactly if their models are equal.

    name, revision: of the weights; `kvpool.checkpoint_model` takes both, and the rest, from a checkpoint's files.
    kv_heads, head_dim: of attention; MLA has latent_dim instead.
    window_tokens:  of layers that all attend to so many tokens at most, their own included; 0: to all.
    dtype:          of the KV cache: "bf16", "fp16", "fp32", "fp8_e4m3", ...
    chunk_tokens:   what is shared in one piece: a power of two, and a multiple of the engine's block size.
    codec:          how pages are kept: "raw", or a lossy one that takes fewer bytes.
    rope:           of the model's config: rope_theta and rope_scaling, or rope_parameters, in any spelling.
    quantization:   of the weights, if the engine quantized them itself rather than reading them so.
    adapters:       digests of adapters that are merged into the weights. An adapter of single requests is an extra of
                    their prompts instead.
    variant:        whatever else changes the KV and is not in the weights, in words: equal only for equal words.
    salt:           of your choice, to keep engines apart that would share; never equal to a word of `variant`.
    """

    name: str
    revision: str
    layers: int = field(kw_only=True)
    kv_heads: int = field(default=0, kw_only=True)
    head_dim: int = field(default=0, kw_only=True)
    latent_dim: int = field(default=0, kw_only=True)
    window_tokens: int = field(default=0, kw_only=True)
    dtype: str | Dtype = field(default="bf16", kw_only=True)
    chunk_tokens: int = field(default=ENGINE_CHUNK_TOKENS, kw_only=True)
    codec: str | Codec = field(default="raw", kw_only=True)
    rope: Mapping[str, Any] | None = field(default=None, kw_only=True)
    quantization: str | None = field(default=None, kw_only=True)
    adapters: Sequence[str] = field(default=(), kw_only=True)
    variant: Sequence[Any] = field(default=(), kw_only=True)
    salt: str | bytes = field(default="", kw_only=True)
    opaque: OpaqueLayout | None = field(default=None, kw_only=True)  # blocks that cannot be taken apart
    spec: KeyspaceSpec = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """raises: InvalidRequest or GeometryUnsupported naming the field."""
        if bool(self.latent_dim) == bool(self.kv_heads and self.head_dim):
            raise InvalidRequest("a model has kv_heads and head_dim, or latent_dim (MLA)")
        group = (
            KvGroup.mla(self.layers, self.latent_dim)
            if self.latent_dim
            else KvGroup(self.layers, self.kv_heads, self.head_dim)
        )
        if self.window_tokens:
            group = replace(group, attention=AttentionKind.SLIDING_WINDOW, window_tokens=self.window_tokens)
        spec = KeyspaceSpec(
            model_id=self.name,
            model_revision=self.revision,
            groups=(group,),
            dtype=_member("dtype", self.dtype, DTYPES),
            codec=_member("codec", self.codec, {codec.name.lower(): codec for codec in Codec}),
            chunk_tokens=self.chunk_tokens,
            payload=PayloadKind.OPAQUE if self.opaque is not None else PayloadKind.CANONICAL,
            opaque=self.opaque,
            salt=self._salt(),
        )
        object.__setattr__(self, "spec", spec)

    def _salt(self) -> bytes:
        """16 bytes over what changes KV beside weights and geometry, each under its own name; empty where that is
        nothing."""
        if isinstance(self.adapters, str):
            raise InvalidRequest("adapters must be a sequence of digests, not one string")
        parts: dict[str, Any] = {
            "rope": normalized_rope(self.rope or {}),
            "quantization": (self.quantization or "").lower(),
            "adapters": sorted(self.adapters),
            "variant": [part for part in self.variant if part],
            "salt": self.salt if isinstance(self.salt, str) else [self.salt.hex()] if self.salt else [],
        }
        parts = {name: part for name, part in parts.items() if part}
        if not parts:
            return b""
        return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).digest()

    @property
    def keyspace_name(self) -> str:
        """What operators see of it by default."""
        return default_keyspace_name(self.spec)


def _member(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    if not isinstance(value, str):
        return value
    if value.lower() not in known:
        raise InvalidRequest(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return known[value.lower()]


def normalized_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embeddings that a config asks for, in one spelling; empty for the plain ones.

    config: a model's, of which only keys of rotary embeddings are read (rope_theta and rope_scaling, as up to version 4
    of transformers, or rope_parameters; one such dict for each kind of layer is fine).
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    if kinds:
        of_all = {key: value for key, value in parameters.items() if key not in kinds}
        plain = {key: value for key, value in config.items() if key != "rope_scaling"}
        each = {
            kind: normalized_rope({**plain, "rope_parameters": {**of_all, **value}})
            for kind, value in sorted(kinds.items())
        }
        distinct = list({json.dumps(one, sort_keys=True): one for one in each.values()}.values())
        return distinct[0] if len(distinct) == 1 else {kind: one for kind, one in each.items() if one}
    found: dict[str, Any] = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if config.get(key) is not None:
            found[key] = config[key]
    given = {key: value for key, value in parameters.items() if value is not None}
    for alias, key in _ROPE_ALIASES.items():  # where both are given, the alias is not read
        if alias in given:
            given = {key: given.pop(alias)} | given
    found |= given
    if found.get("rope_type") in ("default", ""):
        del found["rope_type"]
    if "rope_type" not in found and not found.get("use_fope"):  # plain ones read nothing else
        found = {key: found[key] for key in _PLAIN_ROPE_KEYS if key in found}
    found = {key: _number(value) for key, value in found.items()}
    for key, default in (("rope_theta", _DEFAULT_ROPE_THETA), ("partial_rotary_factor", 1.0), ("use_fope", False)):
        if found.get(key) == default:
            del found[key]
    return found


def names_rope_theta(config: Mapping[str, Any]) -> bool:
    """Whether a config says itself which base its rotary embeddings have, for every kind of layer."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(given.get(name) is not None for given in (config, parameters) for name in ("rope_theta", "theta")):
        return True
    kinds = [value for value in parameters.values() if isinstance(value, Mapping)]
    return bool(kinds) and all(names_rope_theta(kind) for kind in kinds)


def _number(value: Any) -> Any:
    """1 and 1.0 are one number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return [_number(one) for one in value] if isinstance(value, list | tuple) else value


def family_name(config: Mapping[str, Any]) -> str:
    """A name that follows from a model's config, wherever its files lie: "qwen2-24x896"."""
    layers, width = config.get("num_hidden_layers"), config.get("hidden_size")
    return f"{config.get('model_type') or 'model'}-{layers}x{width}"


def default_keyspace_name(spec: KeyspaceSpec) -> str:
    """A name that the index takes, and that differs whenever the keyspace does, as far as a reader can tell."""
    model, revision = spec.model_id[-_NAME_MODEL_MAX:], spec.model_revision[:16]
    name = f"{model}:{revision}-{spec.dtype.name.lower()}-{spec.chunk_tokens}"
    if spec.codec is not Codec.RAW:
        name += f"-{spec.codec.name.lower()}"
    if spec.opaque:
        name += f"-{spec.opaque.engine}-{spec.opaque.isa}-{spec.opaque.block_tokens}"
    if spec.salt:
        name += f"-{spec.salt.hex()[:16]}"
    return re.sub(r"[^A-Za-z0-9._:/-]", "-", name)[-_NAME_MAX:]
