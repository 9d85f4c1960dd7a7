import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.model import DemoModel, build_model, weights_revision
from demo.tokenizer import SPECIAL_TOKENS, TOKENIZER_PATH
from demo.workload import load_workload, render_context

PREFIX_TOKENS, PAGE_TOKENS, REPLY_TOKENS = 256, 16, 12


@pytest.fixture(scope="module")
def default() -> DemoModel:
    return build_model(None, seed=0)


@pytest.fixture(scope="module")
def prefixes(default: DemoModel) -> tuple[Any, Any]:
    """KV of two prompts; generating with it adds to it."""
    prompt, other = prompts(default)[:2]
    return prefix_cache(default, prompt), prefix_cache(default, other)


def generate(demo: DemoModel, prompt: tuple[int, ...], kv_cache: Any = None) -> list[int]:
    token_ids = torch.tensor([prompt])
    output = demo.model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        past_key_values=kv_cache,
        max_new_tokens=REPLY_TOKENS,
        do_sample=False,
    )
    return [int(token_id) for token_id in output[0, len(prompt) :]]


def prefix_cache(demo: DemoModel, prompt: tuple[int, ...]) -> Any:
    with torch.no_grad():
        return demo.model(torch.tensor([prompt[:PREFIX_TOKENS]]), use_cache=True).past_key_values


@cache
def prompts(demo: DemoModel) -> list[tuple[int, ...]]:
    contexts = [render_context(conversation, demo.tokenizer) for conversation in load_workload().conversations]
    return [(*context[: PREFIX_TOKENS + 5], *demo.tokenizer.markers.assistant) for context in contexts]


def test_weights_are_the_same_in_every_process_and_version(default: DemoModel) -> None:
    """Written down, not recomputed: engines of other processes and torch versions must get these very weights."""
    assert (default.name, default.revision) == ("kvpool-demo-llama-0", "cecd93106541f6b5")


def test_another_seed_gives_another_name_and_revision(default: DemoModel) -> None:
    other = build_model(None, seed=1)
    assert other.name != default.name
    assert other.revision != default.revision


def test_kv_is_16_kib_a_token(default: DemoModel) -> None:
    layers = prefix_cache(default, prompts(default)[0]).layers
    size_bytes = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    assert size_bytes == PREFIX_TOKENS * 16 * 1024
    assert {layer.keys.dtype for layer in layers} == {torch.float32}


@pytest.mark.slow
def test_replies_vary_and_follow_the_document(default: DemoModel) -> None:
    replies = [generate(default, prompt) for prompt in prompts(default)]
    assert all(len(reply) == REPLY_TOKENS for reply in replies)
    assert all(len(set(reply)) >= REPLY_TOKENS // 2 for reply in replies)
    assert len({tuple(reply) for reply in replies}) == len(replies)


@pytest.mark.parametrize("page", [0, 9, PREFIX_TOKENS // PAGE_TOKENS - 1])
@pytest.mark.slow
def test_reply_is_kept_by_right_kv_and_changed_by_one_wrong_page(
    default: DemoModel, prefixes: tuple[Any, Any], page: int
) -> None:
    """Without this, equal tokens in the demo would prove nothing."""
    prompt = prompts(default)[0]
    right, foreign = prefixes
    expected = generate(default, prompt)
    assert generate(default, prompt, copy.deepcopy(right)) == expected

    wrong = copy.deepcopy(right)
    tokens = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
    for layer, foreign_layer in zip(wrong.layers, foreign.layers, strict=True):
        layer.keys[:, :, tokens] = foreign_layer.keys[:, :, tokens]
        layer.values[:, :, tokens] = foreign_layer.values[:, :, tokens]
    assert generate(default, prompt, wrong) != expected


def test_revision_follows_the_weights_of_any_dtype() -> None:
    layer = torch.nn.Linear(3, 2, bias=True, dtype=torch.bfloat16)
    before = weights_revision(layer)
    assert weights_revision(layer) == before
    with torch.no_grad():
        layer.bias[1] += 1
    assert weights_revision(layer) != before


def test_local_directory_loads_as_model_and_tokenizer(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=3,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    begin, _, _, end = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_file=str(TOKENIZER_PATH), bos_token=begin, eos_token=end, clean_up_tokenization_spaces=False
    ).save_pretrained(tmp_path)

    demo = build_model(str(tmp_path), seed=0)

    assert demo.name == str(tmp_path)
    assert demo.model.dtype == torch.float32
    assert demo.model.generation_config.eos_token_id is None
    assert not demo.model.training
    assert demo.tokenizer.markers.begin == (0,)
    assert demo.tokenizer.decode(demo.tokenizer.markers.user) == "\n\nUser: "
    assert demo.tokenizer.decode(demo.tokenizer.encode("It is a truth")) == "It is a truth"
