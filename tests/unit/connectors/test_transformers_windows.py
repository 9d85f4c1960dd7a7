"""Models with sliding windows: tokens are those of the model alone, whose own cache drops what has left a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen3NextConfig, StaticCache

from kvpool.client.engine_items import RequestStats
from kvpool.core.errors import InvalidRequest
from tests.unit.connectors.scripted_engine import CHUNK, generator_over
from tests.unit.connectors.scripted_pool import ScriptedPool
from tests.unit.connectors.test_transformers import alone, run
from tests.unit.connectors.tiny_models import padded, prompt, tiny

WINDOW = 3 * CHUNK + 5  # neither a window nor what is behind it ends with a chunk
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "all layers": ("MistralForCausalLM", "MistralConfig", {}),
    "some layers": ("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 16, "query_pre_attn_scalar": 16}),
    "some layers, two rotations": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "smaller than a chunk": ("MistralForCausalLM", "MistralConfig", {"sliding_window": CHUNK // 2 + 1}),
}


def model_of(name: str) -> Any:
    model_class, config_class, settings = MODELS[name]
    model = tiny(model_class, config_class, **{"sliding_window": WINDOW, "tie_word_embeddings": False, **settings})
    if model_class.startswith("Gemma"):  # it enlarges embeddings, until attention does not matter
        model.get_input_embeddings().weight.data /= model.config.hidden_size**0.5
    return model


# Around the edges of windows and chunks, with a tail of 1 to CHUNK tokens that is computed.
LENGTHS = sorted(
    {edge + change for edge in (CHUNK, WINDOW, WINDOW + CHUNK, 6 * CHUNK) for change in (-1, 0, 1, CHUNK // 2)}
)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_equal_at_every_edge(name: str) -> None:
    model = model_of(name)
    whole = prompt(max(LENGTHS), seed=3)
    pool = ScriptedPool()
    generator_over(model, pool).generate(whole, max_new_tokens=1, do_sample=False)
    for length in LENGTHS:
        input_ids = whole[:, :length]
        loaded = run(generator_over(model, ScriptedPool(chunks=pool.chunks)), input_ids)
        chunks = (length - 1) // CHUNK * CHUNK
        assert loaded.stats.prompt_tokens == RequestStats(remote=chunks, recomputed=length - chunks), length
        assert loaded.sequences[0].tolist() == alone(model, input_ids), length


@pytest.mark.parametrize("name", MODELS)
def test_zeroed_chunks_change_tokens(name: str) -> None:
    """The other tests mean nothing if they pass with any KV at all."""
    model, input_ids = model_of(name), prompt(6 * CHUNK + 4, seed=3)
    pool = ScriptedPool()
    run(generator_over(model, pool), input_ids)
    pool.chunks = {key: bytes(len(value)) for key, value in pool.chunks.items()}
    assert run(generator_over(model, pool), input_ids).sequences[0].tolist() != alone(model, input_ids)


@pytest.mark.parametrize("name", MODELS)
def test_padded_rows_and_generated_chunks(name: str) -> None:
    model = model_of(name)
    rows = [prompt(5 * CHUNK + 3, seed=4), prompt(2 * CHUNK + 1, seed=5)]
    pool = ScriptedPool()
    first = generator_over(model, pool).generate(**padded(*rows), max_new_tokens=2 * CHUNK, do_sample=False)
    grown = [torch.cat([row, more[None, -2 * CHUNK :]], dim=1) for row, more in zip(rows, first.sequences, strict=True)]
    for row in grown:
        loaded = run(generator_over(model, ScriptedPool(chunks=pool.chunks)), row)
        assert loaded.stats.prompt_tokens.remote == (row.shape[1] - 1) // CHUNK * CHUNK
        assert loaded.sequences[0].tolist() == alone(model, row)


def test_caches_that_drop_tokens_are_refused_by_name() -> None:
    model = model_of("some layers")
    generator = generator_over(model, ScriptedPool())
    with pytest.raises(InvalidRequest, match=r"DynamicSlidingWindowLayer, which drop .* pass DynamicCache\(\)"):
        generator.generate(prompt(4), past_key_values=DynamicCache(config=model.config))
    with pytest.raises(InvalidRequest, match="StaticSlidingWindowLayer, which drop"):
        generator.generate(prompt(4), past_key_values=StaticCache(config=model.config, max_cache_len=64))
    with pytest.raises(InvalidRequest, match="cache_implementation='static' drops"):
        generator.generate(prompt(4), cache_implementation="static")


def test_caches_with_a_recurrent_state_are_refused_by_name() -> None:
    hybrid = Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(
        InvalidRequest, match=r"DynamicCache with layers of LinearAttention.*, which cannot hold shared"
    ):
        generator_over(model_of("all layers"), ScriptedPool()).generate(
            prompt(4), past_key_values=DynamicCache(config=hybrid)
        )


def test_a_cache_of_the_caller_that_keeps_all_tokens_is_filled() -> None:
    model, input_ids, cache = model_of("some layers"), prompt(6 * CHUNK + 2), DynamicCache()
    pool = ScriptedPool()
    run(generator_over(model, pool), input_ids)
    generator = generator_over(model, ScriptedPool(chunks=pool.chunks))
    loaded = generator.generate(input_ids, past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert loaded.sequences[0].tolist() == alone(model, input_ids)
    assert cache.get_seq_length() == input_ids.shape[1] + 11


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("known_chunks", [0, 1, 3])
def test_what_is_computed_for_one_row_alone_keeps_what_has_left_the_window(name: str, known_chunks: int) -> None:
    model, pool = model_of(name), ScriptedPool()
    prefix = prompt(300, seed=6)
    if known_chunks:
        run(generator_over(model, pool), prefix[:, : known_chunks * CHUNK + 1])
    batch = padded(*(torch.cat([prefix, prompt(length, seed=20 + length)], dim=1) for length in (8, 5, 6)))
    generated = generator_over(model, ScriptedPool(chunks=pool.chunks)).generate(
        **batch, max_new_tokens=12, do_sample=False
    )
    assert [row.recomputed for row in generated.stats.rows] == [308 - known_chunks * CHUNK, 6, 6]
    assert generated.sequences.tolist() == model.generate(**batch, max_new_tokens=12, do_sample=False).tolist()
