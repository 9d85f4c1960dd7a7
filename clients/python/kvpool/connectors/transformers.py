"""Shared prefixes for a Hugging Face causal LM:

    with SharedPrefixGenerator.connect(model, "unix:/path/of/agent.sock") as generator:
        result = generator.generate(input_ids, max_new_tokens=32)
        print(result.sequences, result.stats)

The tokens are those that `model.generate` gives without it. Whatever fails in kvpool only means that more is computed.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvpool.client.config import ClientConfig
from kvpool.client.request_stats import RequestStats
from kvpool.connectors.agent_pool import AgentPool
from kvpool.connectors.block_memory import block_memory
from kvpool.connectors.prefix_cache import PrefixCache
from kvpool.connectors.prefix_pool import PrefixPool
from kvpool.connectors.running_prefix import FoundPrefix, RunningPrefix
from kvpool.connectors.transformers_arguments import check_arguments
from kvpool.connectors.transformers_blocks import KvBlocks, PrefixLost, block_bytes, block_layout
from kvpool.connectors.transformers_model import keyspace_spec, model_name, weights_digest
from kvpool.core.errors import InvalidRequest
from kvpool.core.keyspace import DEFAULT_CHUNK_TOKENS, KeyspaceSpec

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache, PreTrainedModel

DEFAULT_CACHE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Where a prompt's KV came from, and how long it took."""

    prompt_tokens: RequestStats  # by source
    ttft_ms: float  # from the call to the first generated token
    match_ms: float
    load_ms: float
    failure: str  # why kvpool could not help, or not to the end; empty if nothing went wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """sequences: [1, prompt + generated] token ids. output: what `model.generate` returned."""

    sequences: torch.Tensor
    output: Any
    stats: GenerationStats


class SharedPrefixGenerator:
    """Generates with one model, one request at a time; callers on several threads take turns."""

    def __init__(self, model: PreTrainedModel, blocks: KvBlocks, cache: PrefixCache, pool: PrefixPool | None) -> None:
        self._model, self._blocks, self._cache, self._pool = model, blocks, cache, pool
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
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        engine_name: str = "transformers",
        salt: bytes = b"",
        load_timeout_s: float = 30.0,
    ) -> SharedPrefixGenerator:
        """A generator that shares prefixes through the gpuagent at `agent` ("unix:/path" or "host:port").

        model_revision: what the weights are; by default a digest over all of them, which reads them once.
        keyspace_name: what operators see; by default made of model_id, revision, element type and chunk_tokens.
        cache_bytes: memory for the engine's own chunks, which the agent copies from and to: on the model's GPU, which
        has to be the agent's device then, or shared memory of the CPU.
        load_timeout_s: of the first loads; later ones may take as long as computing would, but a second at least.
        An agent that cannot be reached now is tried again later; until then everything is computed.
        raises: GeometryUnsupported naming the model and what cannot be shared; KeyspaceMismatch naming the field;
        InvalidRequest; NotServed if the agent serves another kind of device than the model's.
        """
        spec = keyspace_spec(
            model,
            model_id=model_id or model_name(model),
            model_revision=model_revision or weights_digest(model),
            chunk_tokens=chunk_tokens,
            salt=salt,
        )
        block_count = cache_bytes // block_bytes(spec)
        if block_count < 1:
            raise InvalidRequest(
                f"cache_bytes must hold a chunk of {chunk_tokens} tokens ({block_bytes(spec)} bytes), got {cache_bytes}"
            )
        layout, config = block_layout(spec, block_count), _client_config(agent, model.device.type)
        memory = block_memory(layout.handle_sizes[0], model.device)
        pool = AgentPool(spec, layout, keyspace_name or default_keyspace_name(spec), engine_name, config, memory)
        try:
            blocks = KvBlocks(spec, block_count, memory.bytes_of())
            pool.open()
        except BaseException:
            pool.close()
            raise
        cache = PrefixCache(pool, block_count=block_count, chunk_tokens=chunk_tokens, load_timeout_s=load_timeout_s)
        return cls(model, blocks, cache, pool)

    def generate(self, input_ids: torch.Tensor, **arguments: Any) -> GenerationResult:
        """`model.generate(input_ids, **arguments)`, computing only the part of the prompt that cannot be had.

        raises: InvalidRequest for what is not served: more than one sequence, padding, beam search, assisted
        generation, caches of the caller's, inputs beside token ids.
        """
        streamer = arguments.pop("streamer", None)
        check_arguments(self._model, input_ids, arguments)
        with self._turn:
            return self._generate(input_ids, FirstTokenTimer(streamer), arguments)

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

    def _generate(
        self, input_ids: torch.Tensor, first_token: FirstTokenTimer, arguments: dict[str, Any]
    ) -> GenerationResult:
        import torch

        started_s = time.perf_counter()
        prompt = input_ids[0].cpu().numpy()
        self._blocks.take_turn()
        running = self._cache.begin(prompt)
        try:
            prefill_started_s = time.perf_counter()
            output, kv_cache = self._compute(input_ids, running, first_token, arguments)
        finally:
            found = running.finish()
            self._blocks.end_turn()
            self._cache.release(found)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        first_token_s = first_token.at_s or time.perf_counter()
        stats = self._stats(len(prompt), found, (first_token_s - started_s) * 1e3)
        prefill_ms = (first_token_s - prefill_started_s) * 1e3 - running.waited_ms
        self._cache.note_prefill(stats.prompt_tokens.recomputed, prefill_ms)
        computed = sequences[0, : kv_cache.get_seq_length()].cpu().numpy()
        self._cache.keep(computed, lambda first, blocks: self._blocks.from_cache(kv_cache, first, blocks))
        self._blocks.end_turn()
        return GenerationResult(sequences=sequences, output=output, stats=stats)

    def _compute(
        self, input_ids: torch.Tensor, running: RunningPrefix, first_token: FirstTokenTimer, arguments: dict[str, Any]
    ) -> tuple[Any, DynamicCache]:
        """Generate while the prefix comes in; if it does not come as a whole, once more with what has come."""
        kv_cache = self._blocks.to_cache(running.blocks, self._model, running.wait_layers)
        try:
            return self._model_generate(input_ids, kv_cache, first_token, arguments), kv_cache
        except PrefixLost:
            first_token.restart()
        kv_cache = self._blocks.to_cache(running.finish().blocks, self._model)
        return self._model_generate(input_ids, kv_cache, first_token, arguments), kv_cache

    def _model_generate(
        self, input_ids: torch.Tensor, kv_cache: DynamicCache, first_token: FirstTokenTimer, arguments: dict[str, Any]
    ) -> Any:
        import torch

        return self._model.generate(
            input_ids,
            **{
                **arguments,
                # Every token counts: transformers would else take the padding token, where it occurs, for padding.
                "attention_mask": torch.ones_like(input_ids),
                "past_key_values": kv_cache,
                "streamer": first_token,
            },
        )

    def _stats(self, prompt_count: int, found: FoundPrefix, ttft_ms: float) -> GenerationStats:
        own, loaded = found.own_chunks * self._cache.chunk_tokens, found.loaded.tokens
        return GenerationStats(
            prompt_tokens=RequestStats(
                own=own,
                staging=loaded.staging,
                disk=loaded.disk,
                remote=loaded.remote,
                recomputed=prompt_count - own - loaded.total,
            ),
            ttft_ms=ttft_ms,
            match_ms=found.match_ms,
            load_ms=found.load_ms,
            failure=found.failure,
        )


class FirstTokenTimer:
    """A streamer for `generate` that takes the time of the first token and hands everything on."""

    def __init__(self, streamer: Any = None) -> None:
        self._streamer = streamer
        self._prompt_seen = self._prompt_comes_again = False
        self.at_s: float | None = None  # of time.perf_counter

    def put(self, value: torch.Tensor) -> None:
        """transformers hands over the prompt first, then token by token."""
        if self._prompt_comes_again:
            self._prompt_comes_again = False
            return
        if self._prompt_seen and self.at_s is None:
            self.at_s = time.perf_counter()
        self._prompt_seen = True
        if self._streamer is not None:
            self._streamer.put(value)

    def restart(self) -> None:
        """The generation begins anew after it failed before its first token."""
        self._prompt_comes_again = self._prompt_seen

    def end(self) -> None:
        """Generation has ended."""
        if self._streamer is not None:
            self._streamer.end()


def _client_config(agent: str, device_type: str) -> ClientConfig:
    if device_type != "cuda":
        return ClientConfig(agent_endpoint=agent)
    # An agent with a GPU pins its pagestore's whole arena for the first engine: a second for a few GiB.
    return ClientConfig(agent_endpoint=agent, connect_timeout_s=60.0)


def default_keyspace_name(spec: KeyspaceSpec) -> str:
    """A name that differs whenever the keyspace does, as far as a reader can tell."""
    salted = f"-salt-{spec.salt.hex()[:16]}" if spec.salt else ""
    return f"{spec.model_id}@{spec.model_revision[:16]}-{spec.dtype.name.lower()}-{spec.chunk_tokens}{salted}"
