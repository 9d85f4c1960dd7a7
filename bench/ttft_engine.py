"""One engine process of `bench.ttft_gpu`: `store` computes prompts and stores them, `load` loads them in a new process.

Results go to a JSON file; `load` reads that of `store`.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.ttft_model import (
    SHAPES,
    Shape,
    build_model,
    fingerprint,
    median_ms,
    next_logits,
    prompt_of,
    recompute,
    synchronize,
)
from kvpool.client.config import ClientConfig
from kvpool.connectors.agent_pool import AgentPool
from kvpool.connectors.block_memory import block_memory
from kvpool.connectors.prefix_cache import PrefixCache
from kvpool.connectors.transformers import SharedPrefixGenerator
from kvpool.connectors.transformers_blocks import KvBlocks, block_bytes, block_layout
from kvpool.connectors.transformers_model import shared_model

CHUNK_TOKENS = 256
STORE_TRIES = 4
STORE_TIMEOUT_S = 30.0
ANNOUNCED_WITHIN_S = 3.0
CANDIDATES = 8  # last tokens to choose from


def say(text: str) -> None:
    """At once."""
    print(text, flush=True)


class Engine:
    """A model and its generator, whose parts are driven one by one where each is timed alone."""

    def __init__(self, shape_name: str, device: str, agent: str, most_tokens: int) -> None:
        shape: Shape = SHAPES[shape_name]
        started_s = time.perf_counter()
        self.device, self.model = device, build_model(shape, device)
        say(f"model of shape {shape_name} after {time.perf_counter() - started_s:.1f} s")
        spec = shared_model(
            self.model, model_id=f"ttft-{shape_name}", model_revision="1", chunk_tokens=CHUNK_TOKENS
        ).spec
        block_count = 2 * (most_tokens // CHUNK_TOKENS + 1)  # also when a late load still holds as many
        layout = block_layout(spec, block_count)
        memory = block_memory(block_count * block_bytes(spec), self.model.device)
        # A machine that hiccups in one match must not end the bench.
        config = ClientConfig(agent_endpoint=agent, connect_timeout_s=60.0, match_timeout_s=5.0)
        self._pool = AgentPool(spec, layout, f"ttft-{shape_name}", "ttft", config, memory)
        self.blocks = KvBlocks(spec, block_count, memory.bytes_of())
        started_s = time.perf_counter()
        self._pool.open()
        say(f"registered with {agent} after {time.perf_counter() - started_s:.2f} s")
        self.cache = PrefixCache(
            self._pool,
            block_count=block_count,
            chunk_tokens=CHUNK_TOKENS,
            chunk_bytes=block_bytes(spec),
            always_load=True,
        )
        self.generator = SharedPrefixGenerator(self.model, self.blocks, self.cache, self._pool)

    def first_token(self, prompt: torch.Tensor) -> Any:
        """Through the connector."""
        synchronize(prompt)
        return self.generator.generate(prompt, max_new_tokens=1, do_sample=False)

    def prefix_cache(self, prompt: torch.Tensor, times: dict[str, float]) -> Any:
        """The prompt's prefix in a cache of the model, one step after the other. Raises AssertionError if it is not to
        be had as a whole."""
        synchronize(prompt)
        started_s = time.perf_counter()
        self.blocks.take_turn()
        found = self.cache.find(prompt[0].cpu().numpy())
        found_s = time.perf_counter()
        wanted = (prompt.shape[1] - 1) // CHUNK_TOKENS
        assert len(found.blocks) == wanted, f"{len(found.blocks)} of {wanted} chunks: {found.failure}"
        cache = self.blocks.to_cache(found.blocks, self.model)
        group = self.model.config
        none = torch.empty(
            (1, group.num_key_value_heads, 0, group.head_dim), dtype=self.model.dtype, device=self.model.device
        )
        for number in range(group.num_hidden_layers):
            cache.update(none, none, number)
        synchronize(prompt)
        copied_s = time.perf_counter()
        self.blocks.end_turn()
        self.cache.release(found)
        times["match"], times["load"] = found.match_ms, found.load_ms
        times["hash and find"] = (found_s - started_s) * 1e3 - found.match_ms - found.load_ms
        times["copy into cache"] = (copied_s - found_s) * 1e3
        return cache

    def step(self, prompt: torch.Tensor, cache: Any, times: dict[str, float]) -> torch.Tensor:
        """Logits after the prompt's last token, the only one that is computed."""
        started_s = time.perf_counter()
        logits = next_logits(self.model, prompt[:, -1:], cache)
        int(logits.argmax())
        times["forward"] = (time.perf_counter() - started_s) * 1e3
        return logits


def store(engine: Engine, token_counts: Sequence[int], runs: int) -> dict[str, Any]:
    """What the prompts cost without the pool and what comes out; afterwards all of them are in the pool."""
    results: dict[str, Any] = {}
    for count in token_counts:
        store_prefix(engine, prompt_of(count, 0, engine.device))
        cache = engine.prefix_cache(prompt_of(count, 0, engine.device), {})
        kv = fingerprint(cache, count)
        prompt = decided_prompt(engine, count, cache)
        logits = engine.step(prompt, cache, {})
        samples, token = recompute(engine.model, prompt, runs)
        whole = next_logits(engine.model, prompt, None)
        results[str(count)] = {
            "last_token": int(prompt[0, -1]),
            "recomputed_ms": median_ms(samples),
            "recomputed_ms_samples": [round(sample, 2) for sample in samples],
            "token": token,
            "logits": logits.tolist(),
            "logits_gap": gap_of(logits),
            "logits_off_recomputed": float((whole - logits).abs().max()),
            "kv": kv,
        }
        del cache
        say(f"{count} tokens: recomputed in {median_ms(samples):.1f} ms, token {token}")
    return results


def store_prefix(engine: Engine, prompt: torch.Tensor) -> None:
    """Raises AssertionError if the pool does not take it all."""
    wanted = prompt.shape[1] - 1
    for _ in range(STORE_TRIES):
        started_s = time.perf_counter()
        engine.first_token(prompt)
        computed_s = time.perf_counter()
        assert engine.generator.flush_stores(STORE_TIMEOUT_S), "the store did not end in time"
        stored_s = time.perf_counter()
        engine.generator.forget()
        stored = announced(engine, prompt)
        say(
            f"{wanted} tokens: {stored} stored, {computed_s - started_s:.2f} s computing, {stored_s - computed_s:.2f} s"
        )
        engine.first_token(prompt)  # own again
        assert engine.generator.flush_stores(STORE_TIMEOUT_S), "the store did not end in time"
        # What is expected of a load is what the pool has, not what this process computed again.
        engine.generator.forget()
        if stored >= wanted:
            return
    raise AssertionError(f"the pool did not take {wanted} tokens")


def announced(engine: Engine, prompt: torch.Tensor) -> int:
    """Tokens that the pool has, once the index knows of all or some seconds have passed."""
    ends_at_s = time.monotonic() + ANNOUNCED_WITHIN_S
    while True:
        stored = engine.generator.available_tokens(prompt)
        if stored >= prompt.shape[1] - 1 or time.monotonic() > ends_at_s:
            return stored
        time.sleep(0.02)


def decided_prompt(engine: Engine, token_count: int, cache: Any) -> torch.Tensor:
    """With the last token after which the model is least in doubt: between two near-equal logits bf16 would decide."""
    gaps: list[float] = []
    for last_token in range(CANDIDATES):
        logits = next_logits(engine.model, torch.tensor([[last_token]], device=engine.device), cache)
        gaps.append(gap_of(logits))
        for layer in cache.layers:
            layer.crop(-1)
    return prompt_of(token_count, gaps.index(max(gaps)), engine.device)


def differing(left: Sequence[int], right: Sequence[int]) -> str:
    """Which planes (keys and values of layer 0, of layer 1, ...) are not equal."""
    planes = [number for number, (one, other) in enumerate(zip(left, right, strict=True)) if one != other]
    return f"{len(planes)} of {len(left)} planes differ {planes[:8]}"


def gap_of(logits: torch.Tensor) -> float:
    """Between the two largest."""
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


def load(engine: Engine, stored: dict[str, Any], runs: int) -> dict[str, Any]:
    """TTFT from the pool through the connector, the same step by step, and whether what comes is what was stored."""
    results: dict[str, Any] = {}
    for text, expected in stored.items():
        count = int(text)
        prompt = prompt_of(count, expected["last_token"], engine.device)
        loaded = [loaded_once(engine, prompt) for _ in range(runs + 1)]
        pieces, kv, logits = [], [], []
        for _ in range(runs):
            engine.generator.forget()
            times: dict[str, float] = {}
            cache = engine.prefix_cache(prompt, times)
            found = fingerprint(cache, count)
            kv.append(found == expected["kv"])
            if not kv[-1]:
                say(f"{count} tokens: {differing(expected['kv'], found)}")
            logits.append(engine.step(prompt, cache, times).tolist() == expected["logits"])
            pieces.append(times)
        results[text] = summary(count, expected, loaded, pieces) | {"kv_equal": all(kv), "logits_equal": all(logits)}
        say(f"{count} tokens: {json.dumps(results[text])}")
    return results


def loaded_once(engine: Engine, prompt: torch.Tensor) -> Any:
    """Raises AssertionError if not all of the prefix came from the pool."""
    engine.generator.forget()
    result = engine.first_token(prompt)
    tokens = result.stats.prompt_tokens
    assert tokens.recomputed == 1 and tokens.own == 0, f"{tokens} {result.stats.failure}"
    return result


def summary(
    count: int, expected: dict[str, Any], loaded: Sequence[Any], pieces: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Report the first run separately: the agent may have had to compile kernels."""
    samples = [result.stats.ttft_ms for result in loaded[1:]]
    load_ms = median_ms([result.stats.load_ms for result in loaded[1:]])
    serial = {name: median_ms([times[name] for times in pieces]) for name in pieces[0]}
    ttft_ms = median_ms(samples)
    return {
        "recomputed_ms": expected["recomputed_ms"],
        "loaded_ms": ttft_ms,
        "ratio": round(expected["recomputed_ms"] / ttft_ms, 2),
        "loaded_ms_samples": [round(sample, 2) for sample in samples],
        "loaded_ms_first_run": round(loaded[0].stats.ttft_ms, 2),
        "match_ms": median_ms([result.stats.match_ms for result in loaded[1:]]),
        "load_until_last_layer_ms": load_ms,
        "step_by_step_ms": serial,
        "step_by_step_ms_total": round(sum(serial.values()), 2),
        "from_staging": all(result.stats.prompt_tokens.staging == count for result in loaded[1:]),
        "token_equal": all(int(result.sequences[0, -1]) == expected["token"] for result in loaded),
        "logits_gap": round(expected["logits_gap"], 4),
        "logits_off_recomputed": round(expected["logits_off_recomputed"], 4),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="bench.ttft_engine")
    parser.add_argument("role", choices=("store", "load"))
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--agent", required=True)
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--stored", type=Path, required=True, help="written by store, read by load")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    engine = Engine(arguments.shape, arguments.device, arguments.agent, max(arguments.tokens))
    with engine.generator:
        if arguments.role == "store":
            results = store(engine, arguments.tokens, arguments.runs)
            arguments.stored.write_text(json.dumps(results))
        else:
            results = load(engine, json.loads(arguments.stored.read_text()), max(5, arguments.runs))
            token_bytes = SHAPES[arguments.shape].token_bytes
            for text, result in results.items():
                gigabytes = int(text) * token_bytes / 1e9
                result["load_gb_per_s"] = round(gigabytes / (result["step_by_step_ms"]["load"] / 1e3), 2)
            arguments.output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
