"""Tokens are those of the model alone, whatever the pool gives or fails to give."""

from typing import Any

import pytest
import torch

from kvpool.client.engine_items import RequestStats
from kvpool.connectors.transformers import GenerationResult, SharedPrefixGenerator
from kvpool.core.errors import DeadlineExceeded, ServiceUnavailable
from tests.unit.connectors.scripted_engine import CHUNK, generator_over
from tests.unit.connectors.scripted_pool import ScriptedPool
from tests.unit.connectors.tiny_models import prompt, tiny, tiny_llama

NEW_TOKENS = 12


def alone(model: Any, input_ids: torch.Tensor) -> list[int]:
    """What the model generates without kvpool, given that every token of the prompt counts."""
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    tokens: list[int] = output[0].tolist()
    return tokens


def run(generator: SharedPrefixGenerator, input_ids: torch.Tensor) -> GenerationResult:
    return generator.generate(input_ids, max_new_tokens=NEW_TOKENS, do_sample=False)


@pytest.mark.parametrize(
    ("model_class", "config_class", "settings"),
    [
        ("LlamaForCausalLM", "LlamaConfig", {}),
        ("Qwen2ForCausalLM", "Qwen2Config", {}),
        ("GPT2LMHeadModel", "GPT2Config", {"num_key_value_heads": None}),
        ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 2, "sliding_window": None}),
    ],
)
def test_tokens_are_equal_with_and_without_the_pool(
    model_class: str, config_class: str, settings: dict[str, Any]
) -> None:
    model = tiny(model_class, config_class, **settings)
    input_ids = prompt(5 * CHUNK + 3)
    expected = alone(model, input_ids)
    pool = ScriptedPool()
    first = generator_over(model, pool)
    cold, again = run(first, input_ids), run(first, input_ids)
    shared = run(generator_over(model, ScriptedPool(chunks=pool.chunks)), input_ids)
    for result in (cold, again, shared):
        assert result.sequences[0].tolist() == expected
    assert cold.stats.prompt_tokens == RequestStats(recomputed=5 * CHUNK + 3)
    assert again.stats.prompt_tokens == RequestStats(own=5 * CHUNK, recomputed=3)
    assert shared.stats.prompt_tokens == RequestStats(remote=5 * CHUNK, recomputed=3)
    assert 0 < shared.stats.load_ms < shared.stats.ttft_ms


def test_bfloat16_chunks_travel_bit_for_bit() -> None:
    model = tiny_llama().to(torch.bfloat16)
    input_ids = prompt(2 * CHUNK + 1)
    pool = ScriptedPool()
    cold = run(generator_over(model, pool), input_ids)
    shared = run(generator_over(model, ScriptedPool(chunks=pool.chunks)), input_ids)
    assert shared.stats.prompt_tokens.remote == 2 * CHUNK
    assert shared.sequences[0, : 2 * CHUNK].tolist() == cold.sequences[0, : 2 * CHUNK].tolist()


def test_a_conversation_goes_on_from_generated_tokens() -> None:
    model = tiny_llama()
    pool = ScriptedPool()
    first = generator_over(model, pool)
    turn = run(first, prompt(3 * CHUNK)).sequences  # 48 tokens and 12 more, of which 11 have KV: 3 chunks
    longer = torch.cat([turn, prompt(30, seed=1)], dim=1)
    second = run(first, longer)
    assert second.sequences[0].tolist() == alone(model, longer)
    assert second.stats.prompt_tokens == RequestStats(own=3 * CHUNK, recomputed=42)
    third = torch.cat([second.sequences, prompt(7, seed=2)], dim=1)
    elsewhere = run(generator_over(model, ScriptedPool(chunks=pool.chunks)), third)
    assert elsewhere.sequences[0].tolist() == alone(model, third)
    assert elsewhere.stats.prompt_tokens == RequestStats(remote=6 * CHUNK, recomputed=13)


@pytest.mark.parametrize(
    ("trouble", "loaded_chunks"),
    [
        ({"match_error": DeadlineExceeded("no answer")}, 0),
        ({"load_error": ServiceUnavailable("the agent is gone")}, 0),
        ({"load_limit": 0}, 0),
        ({"load_limit": 2}, 2),
        ({"load_limit": 2, "layers_before_failure": 1}, 2),
        ({"load_error": ServiceUnavailable("the agent is gone"), "layers_before_failure": 1}, 0),
        ({"reachable": False}, 0),
        ({"store_failure": "the arena is full"}, 4),
    ],
)
def test_whatever_the_pool_fails_at_is_computed(trouble: dict[str, Any], loaded_chunks: int) -> None:
    model = tiny_llama()
    input_ids = prompt(4 * CHUNK + 5)
    expected = alone(model, input_ids)
    full = ScriptedPool()
    run(generator_over(model, full), input_ids)
    pool = ScriptedPool(chunks=full.chunks, **trouble)
    generator = generator_over(model, pool)
    result = run(generator, input_ids)
    assert result.sequences[0].tolist() == expected
    assert bool(result.stats.failure) == ("store_failure" not in trouble)
    assert result.stats.prompt_tokens.remote == loaded_chunks * CHUNK
    assert run(generator, input_ids).sequences[0].tolist() == expected


def test_a_wrong_chunk_would_change_the_tokens() -> None:
    """The other tests mean nothing if they pass with any KV at all."""
    model = tiny_llama()
    input_ids = prompt(4 * CHUNK + 5)
    pool = ScriptedPool()
    run(generator_over(model, pool), input_ids)
    other = ScriptedPool()
    run(generator_over(model, other), prompt(4 * CHUNK + 5, seed=1))
    pool.chunks[list(pool.chunks)[1]] = list(other.chunks.values())[1]
    wrong = run(generator_over(model, ScriptedPool(chunks=pool.chunks)), input_ids)
    assert wrong.sequences[0].tolist() != alone(model, input_ids)


def test_a_small_cache_keeps_what_fits() -> None:
    model = tiny_llama()
    generator = generator_over(model, ScriptedPool(), block_count=2)
    input_ids = prompt(4 * CHUNK + 5)
    expected = alone(model, input_ids)
    assert run(generator, input_ids).sequences[0].tolist() == expected
    again = run(generator, input_ids)
    assert again.sequences[0].tolist() == expected
    assert again.stats.prompt_tokens.own == 2 * CHUNK


def test_a_padding_token_in_the_prompt_is_a_token_like_others() -> None:
    model = tiny_llama(pad_token_id=7)
    input_ids = prompt(2 * CHUNK + 4)
    input_ids[0, 5] = 7
    assert run(generator_over(model, ScriptedPool()), input_ids).sequences[0].tolist() == alone(model, input_ids)


def test_sampling_with_a_seed_gives_the_same_tokens() -> None:
    model = tiny_llama()
    generator = generator_over(model, ScriptedPool())
    input_ids = prompt(2 * CHUNK + 4)
    samples = []
    for _ in range(2):
        torch.manual_seed(3)
        result = generator.generate(input_ids, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=0.3)
        samples.append(result.sequences[0].tolist())
    assert samples[0] == samples[1]


class Collector:
    """A streamer as transformers has them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.ended = True


def test_a_streamer_and_the_full_output_are_handed_on() -> None:
    generator = generator_over(tiny_llama(), ScriptedPool())
    collector = Collector()
    result = generator.generate(
        prompt(20),
        max_new_tokens=3,
        streamer=collector,
        return_dict_in_generate=True,
        output_scores=True,
        attention_mask=torch.ones((1, 20), dtype=torch.long),
    )
    assert collector.tokens == result.sequences[0].tolist()
    assert collector.ended
    assert len(result.output.scores) == 3


def test_a_streamer_sees_a_prompt_once_though_its_load_fails_in_the_second_layer() -> None:
    model, input_ids, pool = tiny_llama(), prompt(4 * CHUNK + 5), ScriptedPool()
    run(generator_over(model, pool), input_ids)
    late = ScriptedPool(chunks=pool.chunks, load_limit=1, layers_before_failure=1)
    collector = Collector()
    result = generator_over(model, late).generate(input_ids, max_new_tokens=3, do_sample=False, streamer=collector)
    assert collector.tokens == result.sequences[0].tolist()
    assert result.stats.prompt_tokens == RequestStats(remote=CHUNK, recomputed=3 * CHUNK + 5)


def test_closing_waits_for_stores_and_closes_the_pool() -> None:
    pool = ScriptedPool()
    with generator_over(tiny_llama(), pool) as generator:
        run(generator, prompt(20))
        assert generator.flush_stores(0.0)
    assert pool.closed
    pool.memory.release()  # nothing views the blocks any more
