"""Reads a vLLM request: chunk hashes of its tokens, including everything its KV depends on, and its trace."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kvpool.client.hashing import Prompt
from kvpool.core.chunks import EXTRA_LORA, EXTRA_SALT, ROOT_HASH, Extra, chunk_hashes, multimodal_extra, token_ids
from kvpool.core.errors import InvalidRequest
from kvpool.core.tracing import TraceParent


class Request(Protocol):
    """The attributes of vllm.v1.request.Request that are read."""

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
    @property
    def trace_headers(self) -> Mapping[str, str] | None: ...
    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


def trace_of(request: Request) -> TraceParent | None:
    """Return the request's trace context, which vLLM keeps if it traces itself (--otlp-traces-endpoint)."""
    headers = request.trace_headers
    parent = headers.get("traceparent") if headers else None
    return TraceParent(parent, headers.get("tracestate", "")) if headers and parent else None


def final_tokens(request: Request) -> int:
    """Return the number of leading tokens whose KV has been computed and whose ids are final."""
    return min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)


def scheduled_among(scheduled: Iterable[str], wanted: Collection[str]) -> list[str]:
    """Return those of the scheduled requests that are wanted, in their order. In most steps none is wanted, and they
    are not looked at."""
    return [request_id for request_id in scheduled if request_id in wanted] if wanted else []


def request_chains(
    request: Request,
    adapter: bytes | None,
    hash_keys: Sequence[bytes],
    chunk_tokens: int,
    known: Sequence[Prompt] = (),
    epoch: bytes = b"",
) -> tuple[Prompt, ...]:
    """Return the chains of all current tokens of the request, one for each hash key.

    adapter: identity of its LoRA adapter, if it has one. known: its chains of fewer tokens, if there are any. epoch:
    separates its hashes from those of other weights; empty for the initial ones. raises: InvalidRequest without the
    adapter's identity.
    """
    if request.lora_request is not None and adapter is None:
        raise InvalidRequest(f"the adapter of request {request.request_id} is not known")
    first = known[0].chunk_count if known else 0
    tokens = request.all_token_ids[first * chunk_tokens :]  # a list: numpy reads vLLM's own sequence one by one
    ids, count = token_ids(np.asarray(tokens, dtype=np.int64)), len(tokens) // chunk_tokens
    begins_plain = first or not (request.cache_salt or adapter or epoch)
    extras = None
    if request.mm_features or not begins_plain:
        extras = [_extras(request, adapter, epoch, first + at, chunk_tokens) for at in range(count)]
    token_count, chains = first * chunk_tokens + len(tokens), []
    for number, hash_key in enumerate(hash_keys):
        parent, before = (known[number].parent_hash(first), known[number].packed) if known else (ROOT_HASH, b"")
        added = chunk_hashes(hash_key, ids, chunk_tokens, parent=parent, extras=extras)
        chains.append(Prompt(chunk_tokens, token_count, before + b"".join(added)))
    return tuple(chains)


def _extras(request: Request, adapter: bytes | None, epoch: bytes, chunk: int, chunk_tokens: int) -> list[Extra]:
    start, end = chunk * chunk_tokens, (chunk + 1) * chunk_tokens
    extras: list[Extra] = []
    if chunk == 0:  # chunk 0 is in the hash of every later one
        if request.cache_salt:
            extras.append(Extra(EXTRA_SALT, request.cache_salt.encode()))
        if epoch:
            extras.append(Extra(EXTRA_SALT, epoch))
        if adapter is not None:
            extras.append(Extra(EXTRA_LORA, adapter))
    for feature in request.mm_features:
        offset, length = feature.mm_position.offset, feature.mm_position.length
        if offset < end and start < offset + length:
            extras.append(multimodal_extra(str(feature.identifier).encode(), offset, start))
    return extras
