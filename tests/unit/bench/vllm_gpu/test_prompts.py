"""Prompts of the benches are of tokens that the models have."""

from bench.vllm_gpu.engines import SHAPES, prompt


def test_all_shapes_have_the_tokens_of_prompts() -> None:
    """An embedding that is not there ends an engine, with an error of a later matrix product."""
    tokens = prompt(1_000_000, 1)
    assert max(tokens) < min(shape["vocab_size"] for shape in SHAPES.values())
    assert min(tokens) >= 10
