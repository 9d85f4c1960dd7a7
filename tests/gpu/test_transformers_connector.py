"""`SharedPrefixGenerator` on a GPU: every cache and batch gives the tokens that the model alone gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kvpool.connectors.transformers import GenerationResult, SharedPrefixGenerator
from tests.fixtures.gpu_cluster import GpuHost
from tests.unit.connectors.tiny_models import padded, prompt, tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(110)]

CHUNK, NEW_TOKENS = 32, 8
PREFIX = 6 * CHUNK
CACHES = ["default", "dynamic", "static", "own dynamic", "own static"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama().to("cuda:0")


def connect(host: GpuHost, model: Any) -> SharedPrefixGenerator:
    """A fresh engine: it has no chunks of its own."""
    return SharedPrefixGenerator.connect(
        model,
        host.endpoint(),
        model_id="tiny on a GPU",
        model_revision="1",
        chunk_tokens=CHUNK,
        cache_bytes=8 << 20,
        always_load=True,
    )


@pytest.fixture
def first(host: GpuHost, model: Any) -> Iterator[SharedPrefixGenerator]:
    with connect(host, model) as generator:
        yield generator


def cache_arguments(model: Any, cache: str) -> dict[str, Any]:
    if cache == "own dynamic":
        return {"past_key_values": DynamicCache(config=model.config)}
    if cache == "own static":
        return {"past_key_values": StaticCache(config=model.config, max_cache_len=PREFIX + 64)}
    return {} if cache == "default" else {"cache_implementation": cache}


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def alone(model: Any, inputs: dict[str, torch.Tensor], **arguments: Any) -> list[list[int]]:
    tokens: list[list[int]] = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **arguments).tolist()
    return tokens


def run(generator: SharedPrefixGenerator, inputs: dict[str, torch.Tensor], **arguments: Any) -> GenerationResult:
    result = generator.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **arguments)
    assert result.stats.failure == ""
    return result


def questions(seed: int, *lengths: int) -> dict[str, torch.Tensor]:
    """A left-padded batch of prompts that begin with the same tokens."""
    prefix = prompt(PREFIX, seed=seed)
    rows = [torch.cat([prefix, prompt(length, seed=100 + seed + length)], dim=1) for length in lengths]
    return on_gpu(padded(*rows))


# On a GPU transformers compiles the steps of a static cache, and what compiles them warns of itself.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_and_a_padded_batch_begin_with_what_another_engine_stored(
    host: GpuHost, model: Any, first: SharedPrefixGenerator, cache: str
) -> None:
    seed = 700 + 10 * CACHES.index(cache)
    one, batch = questions(seed, 9), questions(seed, 3, 40, 17)
    plain = {} if "dynamic" in cache or cache == "default" else {"cache_implementation": "static"}
    cold = run(first, one, **cache_arguments(model, cache))
    assert cold.sequences.tolist() == alone(model, one, **plain)
    assert cold.stats.prompt_tokens.recomputed == PREFIX + 9
    assert first.flush_stores(30)
    for inputs, recomputed in ((one, 9), (batch, 3 * 40)):  # a batch is computed together from one column on
        with connect(host, model) as other:
            warm = run(other, inputs, **cache_arguments(model, cache))
        assert warm.sequences.tolist() == alone(model, inputs, **plain)
        assert warm.stats.prompt_tokens.staging >= PREFIX - (40 - 3)
        assert warm.stats.prompt_tokens.recomputed <= recomputed


def test_a_batch_of_unlike_prompts_loads_each_of_them(host: GpuHost, model: Any, first: SharedPrefixGenerator) -> None:
    rows = [prompt(chunks * CHUNK + extra, seed=800 + chunks) for chunks, extra in ((2, 5), (5, 1), (3, 30), (4, 0))]
    batch = on_gpu(padded(*rows))
    cold = run(first, batch)
    assert first.flush_stores(30)
    with connect(host, model) as other:
        warm = run(other, batch)
    assert cold.sequences.tolist() == warm.sequences.tolist() == alone(model, batch)
    assert warm.stats.prompt_tokens.staging >= (5 + 3 + 3) * CHUNK


def test_samples_of_one_prompt_share_it(model: Any, first: SharedPrefixGenerator) -> None:
    inputs = questions(900, 7)
    arguments: dict[str, Any] = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": NEW_TOKENS}
    torch.manual_seed(3)
    expected = model.generate(**inputs, **arguments)
    torch.manual_seed(3)
    result = first.generate(**inputs, **arguments)
    assert result.sequences.tolist() == expected.tolist()


def test_a_streamer_hears_every_token(host: GpuHost, model: Any, first: SharedPrefixGenerator) -> None:
    class Heard:
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.reshape(-1).tolist()

        def end(self) -> None:
            pass

    inputs = questions(950, 11)
    run(first, inputs)
    assert first.flush_stores(30)
    heard = Heard()
    with connect(host, model) as other:
        result = run(other, inputs, streamer=heard)
    assert result.stats.prompt_tokens.staging == PREFIX
    assert heard.tokens == result.sequences[0].tolist() == alone(model, inputs)[0]
