"""What is not served is refused before anything is computed, by name and with the way out."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, StaticCache

from kvpool.core.errors import InvalidRequest
from tests.unit.connectors.scripted_engine import generator_over
from tests.unit.connectors.scripted_pool import ScriptedPool
from tests.unit.connectors.tiny_models import prompt, tiny_llama

TWO_ROWS = torch.ones((2, 4), dtype=torch.long)


def sliding_cache() -> Any:
    return DynamicCache(config=tiny_llama(layer_types=["sliding_attention"] * 2, sliding_window=8).config)


def filled_cache() -> Any:
    cache = DynamicCache()
    cache.update(torch.zeros((1, 2, 3, 16)), torch.zeros((1, 2, 3, 16)), 0)
    return cache


def static_cache(rows: int, token_count: int) -> Any:
    cache = StaticCache(config=tiny_llama().config, max_cache_len=token_count)
    cache.early_initialization(batch_size=rows, num_heads=2, head_dim=16, dtype=torch.float32, device="cpu")
    return cache


@pytest.mark.parametrize(
    ("input_ids", "arguments", "named"),
    [
        (torch.zeros(4, dtype=torch.long), {}, "input_ids must have shape [rows, tokens], got [4]"),
        (torch.zeros((1, 0), dtype=torch.long), {}, "at least one token"),
        (torch.zeros((1, 4)), {}, "must be token ids of type torch.long, got torch.float32"),
        (prompt(4).to("meta"), {}, "input_ids are on meta, the model is on cpu; move them"),
        (prompt(4), {"attention_mask": torch.ones((1, 3))}, "attention_mask must have the shape of input_ids [1, 4]"),
        (prompt(4), {"attention_mask": torch.tensor([[0, 1, 1, 2]])}, "of zeros (padding) and ones"),
        (prompt(4), {"attention_mask": torch.tensor([[1, 1, 1, 0]])}, 'tokenizer.padding_side = "left"'),
        (prompt(4), {"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "pad on the left"),
        (prompt(4), {"attention_mask": torch.tensor([[0, 0, 0, 0]])}, "a row without tokens"),
        (torch.zeros((2, 4), dtype=torch.long), {}, "padding token (0) and there is no attention_mask"),
        (prompt(4), {"num_beams": 2}, "num_beams=2 is not served with shared prefixes: beam search moves rows"),
        (prompt(4), {"generation_config": GenerationConfig(num_beams=3)}, "num_beams=3"),
        (prompt(4), {"use_cache": False}, "use_cache=False"),
        (prompt(4), {"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
        (prompt(4), {"cache_implementation": "offloaded"}, 'only "dynamic" and "static" caches'),
        (
            prompt(4),
            {"generation_config": GenerationConfig(cache_implementation="static")},
            "set it to None there and pass it to generate",
        ),
        (prompt(4), {"inputs_embeds": object()}, "inputs_embeds is not served"),
        (prompt(4), {"position_ids": object()}, "position_ids is not served"),
        (prompt(4), {"assistant_model": object()}, "assistant_model is not served"),
        (prompt(4), {"past_key_values": object()}, "past_key_values is a object, which cannot hold shared chunks"),
        (
            prompt(4),
            {"past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())},
            "EncoderDecoderCache, which cannot hold shared chunks; leave past_key_values out, or pass an empty Dynamic",
        ),
        (prompt(4), {"past_key_values": sliding_cache()}, "DynamicCache with layers of DynamicSlidingWindowLayer"),
        (prompt(4), {"past_key_values": DynamicCache(offloading=True)}, "DynamicCache that offloads"),
        (prompt(4), {"past_key_values": filled_cache()}, "holds 3 tokens already; pass the whole prompt and an empty"),
        (prompt(4), {"past_key_values": static_cache(1, 8), "max_new_tokens": 5}, "make it with max_cache_len=9"),
        (TWO_ROWS, {"past_key_values": static_cache(1, 99), "max_new_tokens": 5}, "StaticCache for a batch of 1"),
        (
            prompt(4),
            {"past_key_values": DynamicCache(), "cache_implementation": "static"},
            "either past_key_values or cache_implementation",
        ),
    ],
)
def test_what_is_not_served_is_refused(input_ids: torch.Tensor, arguments: dict[str, Any], named: str) -> None:
    pool = ScriptedPool()
    with pytest.raises(InvalidRequest) as refused:
        generator_over(tiny_llama(), pool).generate(input_ids, **arguments)
    assert named in str(refused.value)
    assert not pool.matches


def test_a_model_in_training_and_beams_in_its_config_are_refused() -> None:
    model = tiny_llama()
    generator = generator_over(model, ScriptedPool())
    model.train()
    with pytest.raises(InvalidRequest, match=r"call model.eval\(\)"):
        generator.generate(prompt(4))
    model.eval()
    model.generation_config.num_beams = 4
    with pytest.raises(InvalidRequest, match="num_beams=4"):
        generator.generate(prompt(4))


def test_a_model_that_was_converted_after_it_was_connected_is_refused() -> None:
    model = tiny_llama()
    generator = generator_over(model, ScriptedPool())
    model.bfloat16()
    with pytest.raises(InvalidRequest, match=r"was torch.float32 on cpu .* is torch.bfloat16 on cpu now; connect it"):
        generator.generate(prompt(4))
