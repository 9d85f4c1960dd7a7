"""Rows of a batch get the tokens that `model.generate` gives them, and share what they have in common."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from kvpool.client.engine_items import RequestStats
from kvpool.connectors.transformers import GenerationResult, SharedPrefixGenerator
from kvpool.connectors.transformers_batch import pads_cleanly
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, ServiceUnavailable
from tests.unit.connectors.scripted_engine import CHUNK, generator_over
from tests.unit.connectors.scripted_pool import ScriptedPool
from tests.unit.connectors.tiny_models import padded, prompt, tiny, tiny_llama

NEW_TOKENS = 8
MODELS: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaForCausalLM", "LlamaConfig", {}),
    ("Qwen2ForCausalLM", "Qwen2Config", {}),
    ("GPT2LMHeadModel", "GPT2Config", {"num_key_value_heads": None}),
]


def alone(model: Any, inputs: dict[str, torch.Tensor], **arguments: Any) -> list[list[int]]:
    """What `model.generate` gives for the batch."""
    output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **arguments)
    tokens: list[list[int]] = output.tolist()
    return tokens


def run(generator: SharedPrefixGenerator, inputs: dict[str, torch.Tensor], **arguments: Any) -> GenerationResult:
    return generator.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **arguments)


def questions(prefix_tokens: int, *lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Prompts that begin with the same tokens."""
    prefix = prompt(prefix_tokens, seed=seed)
    return [torch.cat([prefix, prompt(length, seed=100 + seed + length)], dim=1) for length in lengths]


@pytest.mark.parametrize(("model_class", "config_class", "settings"), MODELS)
def test_rows_of_different_lengths_share_a_prefix(
    model_class: str, config_class: str, settings: dict[str, Any]
) -> None:
    model = tiny(model_class, config_class, **settings)
    pool = ScriptedPool()
    cold_batch, warm_batch = padded(*questions(5 * CHUNK, 3, 20, 9)), padded(*questions(5 * CHUNK, 14, 2, 7))
    cold = run(generator_over(model, pool), cold_batch)
    stored = [chunk_hash for span in pool.stores for chunk_hash in span.hashes]
    assert len(stored) == len(set(stored))
    elsewhere = ScriptedPool(chunks=pool.chunks)
    warm = run(generator_over(model, elsewhere), warm_batch)
    assert cold.sequences.tolist() == alone(model, cold_batch)
    assert warm.sequences.tolist() == alone(model, warm_batch)
    assert len(elsewhere.loads) == 1  # rows after the first have it
    assert warm.stats.rows[0] == RequestStats(remote=5 * CHUNK, recomputed=14)
    assert sum(row.own for row in warm.stats.rows[1:]) > 8 * CHUNK
    assert warm.stats.prompt_tokens.prompt == int(warm_batch["attention_mask"].sum())


def test_a_batch_stores_what_its_rows_find_alone_later() -> None:
    """Chunks are addressed by a row's own tokens: padding is not among them, generated tokens are."""
    model, pool = tiny_llama(), ScriptedPool()
    rows = [prompt(2 * CHUNK + 5, seed=1), prompt(4 * CHUNK + 12, seed=2)]
    batch = run(generator_over(model, pool), padded(*rows, pad=5))
    assert len(pool.chunks) == 2 + 5
    for row, one, chunks in zip(rows, batch.sequences, (2, 5), strict=True):
        longer = torch.cat([one[-row.shape[1] - NEW_TOKENS :].unsqueeze(0), prompt(3, seed=3)], dim=1)
        result = run(generator_over(model, ScriptedPool(chunks=pool.chunks)), {"input_ids": longer})
        assert result.stats.prompt_tokens.remote == chunks * CHUNK
        assert result.sequences.tolist() == alone(model, padded(longer))


def test_a_prefix_that_is_new_to_all_is_computed_for_the_first_row_only() -> None:
    model = tiny_llama()
    batch = padded(*questions(300, 8, 5, 6))
    result = run(generator_over(model, ScriptedPool()), batch)
    assert result.sequences.tolist() == alone(model, batch)
    assert [row.recomputed for row in result.stats.rows] == [308, 6, 6]  # the last 6 columns together
    assert [row.own for row in result.stats.rows] == [0, 299, 300]


def test_a_new_row_beside_known_ones_is_completed_alone() -> None:
    model, pool = tiny_llama(), ScriptedPool()
    known = prompt(20 * CHUNK + 3, seed=1)
    run(generator_over(model, pool), {"input_ids": known})
    batch = padded(known, prompt(18 * CHUNK, seed=2), known)
    result = run(generator_over(model, ScriptedPool(chunks=pool.chunks)), batch)
    assert result.sequences.tolist() == alone(model, batch)
    assert [row.recomputed for row in result.stats.rows] == [3, 18 * CHUNK, 3]


def test_rows_that_are_wholly_known_leave_a_token() -> None:
    model = tiny_llama()
    generator, batch = generator_over(model, ScriptedPool()), padded(prompt(3 * CHUNK), prompt(3 * CHUNK))
    for _ in range(2):
        assert run(generator, batch).sequences.tolist() == alone(model, batch)
    assert [row.recomputed for row in run(generator, batch).stats.rows] == [CHUNK, CHUNK]
    assert run(generator, padded(prompt(1), prompt(1, seed=1))).sequences.shape == (2, 1 + NEW_TOKENS)


@pytest.mark.parametrize(
    ("trouble", "matches", "failure"),
    [
        ({"match_error": DeadlineExceeded("no answer")}, 1, "no answer"),
        ({"load_error": ServiceUnavailable("the agent is gone")}, 2, "the agent is gone"),
        ({"load_limit": 2}, 2, "a page was damaged"),
        ({"reachable": False}, 0, "the pool cannot be reached"),
        ({"store_failure": "the arena is full"}, 2, ""),
    ],
)
def test_whatever_the_pool_fails_at_is_computed(trouble: dict[str, Any], matches: int, failure: str) -> None:
    model, full = tiny_llama(), ScriptedPool()
    batch = padded(prompt(4 * CHUNK + 5, seed=1), prompt(3 * CHUNK + 2, seed=2))
    run(generator_over(model, full), batch)
    pool = ScriptedPool(chunks=full.chunks, **trouble)
    result = run(generator_over(model, pool), batch)
    assert result.sequences.tolist() == alone(model, batch)
    assert failure in result.stats.failure
    assert bool(result.stats.failure) == bool(failure)
    assert len(pool.matches) == matches  # a pool that fails costs one deadline, not one for each row


def test_rows_that_begin_alike_load_that_once_and_the_rest_beside_each_other() -> None:
    model, pool = tiny_llama(), ScriptedPool()
    shared = prompt(2 * CHUNK, seed=9)
    rows = [torch.cat([shared, prompt(length, seed=length)], dim=1) for length in (3 * CHUNK + 4, 2 * CHUNK + 9)]
    batch = padded(*rows, prompt(4 * CHUNK + 1, seed=3))
    run(generator_over(model, pool), batch)
    elsewhere = ScriptedPool(chunks=pool.chunks)
    result = run(generator_over(model, elsewhere), batch)
    assert result.sequences.tolist() == alone(model, batch)
    loaded = [span.hashes for span in elsewhere.loads]
    assert [len(hashes) for hashes in loaded] == [5, 4, 2]  # the last one is of the row that waited for the first
    assert len({one for hashes in loaded for one in hashes}) == 11


def test_a_wrong_chunk_would_change_the_tokens_of_its_row() -> None:
    model, pool = tiny_llama(), ScriptedPool()
    batch = padded(prompt(4 * CHUNK + 5, seed=1), prompt(3 * CHUNK + 2, seed=2))
    run(generator_over(model, pool), batch)
    hashes = list(pool.chunks)
    pool.chunks[hashes[5]] = pool.chunks[hashes[1]]
    wrong = run(generator_over(model, ScriptedPool(chunks=pool.chunks)), batch).sequences.tolist()
    right = alone(model, batch)
    assert wrong[0] == right[0]
    assert wrong[1] != right[1]


def test_a_small_cache_gives_what_it_has_room_for() -> None:
    model, pool = tiny_llama(), ScriptedPool()
    batch = padded(*(prompt(length, seed=length) for length in (70, 50, 40)))
    for _ in range(2):
        assert run(generator_over(model, pool, block_count=3), batch).sequences.tolist() == alone(model, batch)


def test_a_single_row_may_be_padded() -> None:
    model, pool = tiny_llama(), ScriptedPool()
    row = prompt(3 * CHUNK + 2)
    run(generator_over(model, pool), {"input_ids": row})
    wide = {
        "input_ids": torch.cat([torch.zeros((1, 7), dtype=torch.long), row], dim=1),
        "attention_mask": torch.tensor([[0] * 7 + [1] * row.shape[1]]),
    }
    result = run(generator_over(model, ScriptedPool(chunks=pool.chunks)), wide)
    assert result.sequences.tolist() == alone(model, wide)
    assert result.stats.prompt_tokens == RequestStats(remote=3 * CHUNK, recomputed=2)


def test_what_comes_after_the_end_of_a_row_is_not_kept() -> None:
    model, pool = tiny_llama(), ScriptedPool()
    batch = padded(prompt(CHUNK + 8, seed=1), prompt(CHUNK + 8, seed=2))
    first = alone(model, batch)[0][CHUNK + 8]
    plain = model.generate(**batch, max_new_tokens=24, do_sample=False, eos_token_id=first)
    result = generator_over(model, pool).generate(**batch, max_new_tokens=24, do_sample=False, eos_token_id=first)
    assert result.sequences.tolist() == plain.tolist()
    lengths = [span.chain for span in pool.stores]
    assert [len(chain) for chain in lengths] == [1, 2]


def test_several_samples_of_one_prompt_share_its_kv() -> None:
    model, generator = tiny_llama(), generator_over(tiny_llama(), ScriptedPool())
    arguments: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(5)
    expected = model.generate(**padded(prompt(300)), **arguments)
    torch.manual_seed(5)
    result = generator.generate(prompt(300), **arguments)
    assert result.sequences.tolist() == expected.tolist()
    assert [row.recomputed for row in result.stats.rows] == [300, 1, 1]


@pytest.mark.parametrize(("model_class", "config_class", "settings"), MODELS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_static_cache_begins_with_what_is_known(
    model_class: str, config_class: str, settings: dict[str, Any], rows: int
) -> None:
    model, pool = tiny(model_class, config_class, **settings), ScriptedPool()
    batch = padded(*questions(4 * CHUNK, *(4, 11, 6)[:rows]))
    expected = alone(model, batch)
    cold = run(generator_over(model, pool), batch, cache_implementation="static")
    warm = run(generator_over(model, ScriptedPool(chunks=pool.chunks)), batch, cache_implementation="static")
    assert cold.sequences.tolist() == warm.sequences.tolist() == expected
    assert warm.stats.rows[-1].recomputed <= 11
    assert warm.stats.prompt_tokens.recomputed == {1: 4, 3: 3 * 11}[rows]


def test_a_cache_of_the_callers_is_filled_and_may_be_used_again() -> None:
    model, pool = tiny_llama(), ScriptedPool()
    batch = padded(*questions(4 * CHUNK, 4, 11))
    run(generator_over(model, pool), batch)
    generator = generator_over(model, ScriptedPool(chunks=pool.chunks))
    width = batch["input_ids"].shape[1]
    static = StaticCache(config=model.config, max_cache_len=width + NEW_TOKENS)
    caches: list[Any] = [DynamicCache(), DynamicCache(config=model.config), static, static]
    for cache in caches:
        if cache is static:
            static.reset()
        result = run(generator, batch, past_key_values=cache)
        assert result.sequences.tolist() == alone(model, batch)
        assert int(cache.get_seq_length()) == width + NEW_TOKENS - 1
        assert result.stats.prompt_tokens.recomputed < width


def test_a_model_that_takes_no_note_of_padding_is_refused_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    assert pads_cleanly(model)
    forward = model.forward
    # As models do that count positions themselves, from the first column on.
    monkeypatch.setattr(model, "forward", lambda *args, **rest: forward(*args, **{**rest, "position_ids": None}))
    generator = generator_over(model, ScriptedPool())
    with pytest.raises(InvalidRequest, match=r"LlamaForCausalLM gives a padded row other KV .* without padding"):
        run(generator, padded(prompt(5), prompt(3)))
    run(generator, padded(prompt(5), prompt(5)))
