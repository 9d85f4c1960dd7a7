"""The chunk hashes of one vLLM request: its tokens and everything else that its KV depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvpool.client.hashing import Chain
from kvpool.core.chunks import EXTRA_LORA, EXTRA_SALT, Extra, multimodal_extra

_ADAPTER_FILES = ("*.safetensors", "*.bin", "*.pt", "*.json")


class Request(Protocol):
    """What is read of vllm.v1.request.Request."""

    @property
    def request_id(self) -> str: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_in_flight_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def lora_request(self) -> Any: ...
    @property
    def mm_features(self) -> Sequence[Any]: ...
    @property
    def prompt_embeds(self) -> Any: ...
    @property
    def resumable(self) -> bool: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...


class Adapters:
    """What LoRA adapters are, by their files: a name or a path may mean another adapter on another machine."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], bytes | None] = {}

    def identity(self, lora_request: Any) -> bytes | None:
        """32 bytes over the files of a local adapter; None for one whose files are not here."""
        key = (str(lora_request.lora_name), str(lora_request.lora_path))
        if key not in self._known:
            self._known[key] = directory_digest(Path(key[1]), _ADAPTER_FILES)
        return self._known[key]


def directory_digest(directory: Path, patterns: Sequence[str]) -> bytes | None:
    """32 bytes over name and content of the matching files; None if there are none."""
    files = sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
    if not files:
        return None
    hasher = hashlib.blake2b(digest_size=32)
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, hashlib.blake2b).digest()
        hasher.update(json.dumps(path.name).encode() + content)
    return hasher.digest()


def is_shareable(request: Request, adapters: Adapters) -> bool:
    """Whether equal keys mean equal KV for this request."""
    if request.prompt_embeds is not None or request.resumable:  # a session's tokens change under its hashes
        return False
    return request.lora_request is None or adapters.identity(request.lora_request) is not None


def request_chain(
    request: Request, adapters: Adapters, hash_key: bytes, chunk_tokens: int, known: Chain | None = None
) -> Chain:
    """The chain of all tokens that the request has now. known: of fewer of its tokens."""
    tokens = np.asarray(request.all_token_ids, dtype=np.int64)
    first = known.chunk_count if known is not None else 0
    count = len(tokens) // chunk_tokens - first
    plain = request.lora_request is None and not request.mm_features and (first or not request.cache_salt)
    extras = None if plain else [_extras(request, adapters, first + at, chunk_tokens) for at in range(count)]
    if known is not None:
        return known.extended(hash_key, tokens, extras)
    return Chain.of(hash_key, tokens, chunk_tokens, extras)


def _extras(request: Request, adapters: Adapters, chunk: int, chunk_tokens: int) -> list[Extra]:
    start, end = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
    extras: list[Extra] = []
    if chunk == 0:  # chunk 0 is in the hash of every later one
        if request.cache_salt:
            extras.append(Extra(EXTRA_SALT, request.cache_salt.encode()))
        identity = adapters.identity(request.lora_request) if request.lora_request is not None else None
        if identity is not None:
            extras.append(Extra(EXTRA_LORA, identity))
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if offset < end and start < offset + length:
            extras.append(multimodal_extra(str(feature.identifier).encode(), offset, start))
    return extras
