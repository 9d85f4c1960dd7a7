"""Shared prefixes for a Hugging Face causal LM:

    with SharedPrefixGenerator.connect(model, "unix:/path/of/agent.sock") as generator:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        result = generator.generate(**inputs, max_new_tokens=32)
        print(result.sequences, result.stats)

The tokens are those that `model.generate` gives without it. Whatever fails in kvpool only means that more is computed.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvpool.client.config import ClientConfig
from kvpool.client.engine_items import RequestStats
from kvpool.client.tls import tls_from_environment
from kvpool.connectors.agent_pool import AgentPool
from kvpool.connectors.block_memory import block_memory
from kvpool.connectors.first_token import FirstTokenTimer
from kvpool.connectors.prefix import Prefix
from kvpool.connectors.prefix_cache import PrefixCache, PrefixPool
from kvpool.connectors.transformers_arguments import CheckedCall, check_arguments
from kvpool.connectors.transformers_batch import FilledBatch, fill_batch, len_to_end, own_tokens, pads_cleanly
from kvpool.connectors.transformers_blocks import KvBlocks, PrefixLost, block_bytes, block_layout
from kvpool.connectors.transformers_caches import new_cache
from kvpool.connectors.transformers_model import shared_model
from kvpool.core.errors import InvalidRequest
from kvpool.core.model import ENGINE_CHUNK_TOKENS

if TYPE_CHECKING:
    import torch
    from transformers import Cache, DynamicCache, PreTrainedModel

DEFAULT_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Where the prompts' KV came from, and how long it took."""

    prompt_tokens: RequestStats  # by source, all rows together
    rows: tuple[RequestStats, ...]  # the same of each row; what it has from a row before it counts as own
    ttft_ms: float  # from the call to the first generated token
    match_ms: float
    load_ms: float
    failure: str  # why kvpool could not help, or not to the end; empty if nothing went wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """sequences: [rows, prompt + generated] token ids. output: what `model.generate` returned."""

    sequences: torch.Tensor
    output: Any
    stats: GenerationStats


class SharedPrefixGenerator:
    """Generates with one model, one request at a time; callers on several threads take turns."""

    def __init__(self, model: PreTrainedModel, blocks: KvBlocks, cache: PrefixCache, pool: PrefixPool | None) -> None:
        self._model, self._blocks, self._cache, self._pool = model, blocks, cache, pool
        self._connected_as = (model.dtype, model.device)
        self._clean_padding: bool | None = None  # not known before a row with padding comes
        self._turn = threading.Lock()

    @classmethod
    def connect(
        cls,
        model: PreTrainedModel,
        agent: str,
        *,
        model_id: str | None = None,
        model_revision: str | None = None,
        keyspace_name: str | None = None,
        chunk_tokens: int = ENGINE_CHUNK_TOKENS,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        engine_name: str = "transformers",
        salt: str | bytes = "",
        load_timeout_s: float = 30.0,
        match_timeout_s: float = 0.5,
        connect_timeout_s: float | None = None,
        always_load: bool = False,
    ) -> SharedPrefixGenerator:
        """A generator that shares prefixes through the gpuagent at `agent` ("unix:/path" or "host:port").

        model_revision: what the weights are; by default a digest of samples of their files, as vLLM's connector takes
        it too, or of all of them in memory where they are not those of the files.
        keyspace_name: what operators see; by default made of model_id, revision, element type and chunk_tokens.
        cache_bytes: of the engine's own chunks: on the model's GPU, which is the agent's then, or in shared memory.
        load_timeout_s: of the first loads; later ones may take as long as computing would, but a second at least.
        match_timeout_s: of asking the agent. One that cannot be reached now is tried later; till then all is computed.
        connect_timeout_s: of registering; by default 5 s, and a minute on a GPU, whose agent may pin memory first.
        always_load: also what would be computed quicker.
        raises: GeometryUnsupported naming the model and what cannot be shared; KeyspaceMismatch naming the field;
        InvalidRequest; NotServed if the agent serves another kind of device than the model's.
        """
        shared = shared_model(
            model, model_id=model_id, model_revision=model_revision, chunk_tokens=chunk_tokens, salt=salt
        )
        spec = shared.spec
        block_count = cache_bytes // block_bytes(spec)
        if block_count < 1:
            raise InvalidRequest(
                f"cache_bytes must hold a chunk of {chunk_tokens} tokens ({block_bytes(spec)} bytes), got {cache_bytes}"
            )
        layout = block_layout(spec, block_count)
        config = _client_config(agent, model.device.type, match_timeout_s, connect_timeout_s)
        memory = block_memory(layout.handle_sizes[0], model.device)
        pool = AgentPool(spec, layout, keyspace_name or shared.keyspace_name, engine_name, config, memory)
        try:
            blocks = KvBlocks(spec, block_count, memory.bytes_of())
            pool.open()
        except BaseException:
            pool.close()
            raise
        values = dict[str, Any](chunk_bytes=block_bytes(spec), load_timeout_s=load_timeout_s, always_load=always_load)
        return cls(model, blocks, PrefixCache(pool, block_count=block_count, chunk_tokens=chunk_tokens, **values), pool)

    def generate(self, input_ids: torch.Tensor, **arguments: Any) -> GenerationResult:
        """`model.generate(input_ids, **arguments)`, computing only the part of the prompts that cannot be had.

        input_ids: [rows, tokens]; shorter rows are padded on the left, with an attention_mask that says so. Without a
        mask every token counts. past_key_values: an empty DynamicCache or StaticCache, if the caller wants to have it.
        raises: InvalidRequest naming what is not served and the way out: beam search, assisted generation, other
        caches, inputs beside token ids.
        """
        first_token = FirstTokenTimer(arguments.pop("streamer", None))
        with self._turn:
            self._check_model()
            call = check_arguments(self._model, input_ids, arguments)
            return self._generate_one(call, first_token) if call.streamed else self._generate_batch(call, first_token)

    def available_tokens(self, input_ids: torch.Tensor) -> int:
        """Leading tokens of a prompt [1, tokens] whose KV the engine or the pool has now. Raises KvPoolError."""
        with self._turn:
            return self._cache.available_chunks(input_ids[0].tolist()) * self._cache.chunk_tokens

    def forget(self) -> None:
        """Drop the engine's own chunks, so that later prompts are asked of the pool."""
        with self._turn:
            self._cache.forget()

    def flush_stores(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything generated so far is in the pool (or failed to get there); False if time ran out."""
        return self._cache.flush_stores(timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """Wait for running stores and let go of the pool. Idempotent."""
        with self._turn:
            self._cache.flush_stores(timeout_s)
            if self._pool is not None:
                self._blocks.close()
                self._pool.close()

    def __enter__(self) -> SharedPrefixGenerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_model(self) -> None:
        now = (self._model.dtype, self._model.device)
        if now != self._connected_as:
            was = " on ".join(map(str, self._connected_as))
            raise InvalidRequest(
                f"the model was {was} when it was connected and is {' on '.join(map(str, now))} now; connect it again"
            )

    def _generate_one(self, call: CheckedCall, first_token: FirstTokenTimer) -> GenerationResult:
        """The model begins while the prefix comes in."""
        started_s = time.perf_counter()
        prompt = call.input_ids[0].cpu().numpy()
        self._blocks.take_turn()
        running = self._cache.begin(prompt)
        try:
            prefill_started_s = time.perf_counter()
            output, kv_cache = self._compute(call, running, first_token)
        finally:
            found = running.finish()
            self._blocks.end_turn()
            self._cache.release(found)
        times = _Times(started_s, prefill_started_s + running.waited_ms / 1e3, first_token.at_s or time.perf_counter())
        filled = FilledBatch.of_one(len(prompt), found, self._cache.chunk_tokens)
        return self._finish(call, output, kv_cache, filled, times)

    def _generate_batch(self, call: CheckedCall, first_token: FirstTokenTimer) -> GenerationResult:
        """All that is known is put into the cache first, then the model computes the rest of all rows together."""
        if call.padded and not self._pads_cleanly():
            raise InvalidRequest(
                f"{type(self._model).__name__} gives a padded row other KV than the row alone has; call generate once "
                "for each prompt, without padding"
            )
        started_s = time.perf_counter()
        kv_cache = call.cache
        if kv_cache is None:
            kv_cache = new_cache(self._model, call.cache_implementation, call.needed_tokens)
        rows = own_tokens(call.input_ids, call.attention_mask)
        self._blocks.take_turn()
        filled = fill_batch(self._model, self._blocks, self._cache, rows, call.input_ids.shape[1], kv_cache)
        self._blocks.end_turn()
        output = self._model_generate(call, kv_cache, first_token)
        times = _Times(started_s, started_s + filled.waited_ms / 1e3, first_token.at_s or time.perf_counter())
        return self._finish(call, output, kv_cache, filled, times)

    def _finish(
        self, call: CheckedCall, output: Any, kv_cache: Cache, filled: FilledBatch, times: _Times
    ) -> GenerationResult:
        """Tell how it was, and keep what is new."""
        import torch

        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        total = sum(filled.rows, RequestStats())
        self._cache.note_prefill(total.recomputed, (times.first_token_s - times.prefill_started_s) * 1e3)
        self._blocks.take_turn()
        computed = sequences[:, : int(kv_cache.get_seq_length())].cpu().numpy()
        for row, padding in enumerate((call.attention_mask == 0).sum(dim=1).tolist()):
            tokens = computed[row, padding:]
            tokens = tokens[: len_to_end(tokens, call.input_ids.shape[1] - padding, call.eos_tokens)]
            self._cache.keep(tokens, partial(self._blocks.from_cache, kv_cache, row=row, padding=padding))
        self._blocks.end_turn()
        stats = GenerationStats(
            prompt_tokens=total,
            rows=filled.rows,
            ttft_ms=(times.first_token_s - times.started_s) * 1e3,
            match_ms=filled.match_ms,
            load_ms=filled.load_ms,
            failure=filled.failure,
        )
        return GenerationResult(sequences=sequences, output=output, stats=stats)

    def _compute(self, call: CheckedCall, running: Prefix, first_token: FirstTokenTimer) -> tuple[Any, DynamicCache]:
        """Generate while the prefix comes in; if it does not come as a whole, once more with what has come."""
        kv_cache = self._blocks.to_cache(running.blocks, self._model, running.wait_layers)
        try:
            return self._model_generate(call, kv_cache, first_token), kv_cache
        except PrefixLost:
            first_token.restart()
        kv_cache = self._blocks.to_cache(running.finish().blocks, self._model)
        return self._model_generate(call, kv_cache, first_token), kv_cache

    def _model_generate(self, call: CheckedCall, kv_cache: Cache, first_token: FirstTokenTimer) -> Any:
        return self._model.generate(
            call.input_ids,
            **{
                **call.arguments,
                # Always: transformers would else take the padding token, where it occurs, for padding.
                "attention_mask": call.attention_mask,
                "past_key_values": kv_cache,
                "streamer": first_token,
            },
        )

    def _pads_cleanly(self) -> bool:
        if self._clean_padding is None:
            self._clean_padding = pads_cleanly(self._model)
        return self._clean_padding


@dataclass(frozen=True, slots=True)
class _Times:
    """Of time.perf_counter; waiting for the pool is not part of the prefill."""

    started_s: float
    prefill_started_s: float
    first_token_s: float


def _client_config(
    agent: str, device_type: str, match_timeout_s: float, connect_timeout_s: float | None
) -> ClientConfig:
    config = ClientConfig(agent_endpoint=agent, match_timeout_s=match_timeout_s, tls=tls_from_environment(os.environ))
    if connect_timeout_s is None and device_type == "cuda":
        # An agent with a GPU pins its pagestore's whole arena for the first engine: a second for a few GiB.
        connect_timeout_s = 60.0
    return config if connect_timeout_s is None else replace(config, connect_timeout_s=connect_timeout_s)
