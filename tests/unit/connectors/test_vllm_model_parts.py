"""A tier's keyspace differs where its KV depends on more than weights and tokens, and nowhere else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.connectors.vllm.model_parts import kv_kinds, model_parts
from tests.unit.connectors.vllm_configs import a_drafter, configured


@dataclass
class MambaSpec:
    """As vLLM's."""

    shapes: tuple[tuple[int, ...], ...] = ((3, 512), (4, 64, 64))
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    page_size_padded: int | None = None


@dataclass
class FullAttentionSpec:
    """As vLLM's."""

    num_kv_heads: int = 8
    dtype: str = "bfloat16"
    num_head_slots: int | None = None
    tokens_per_state: int = 1
    sliding_window: int | None = None


@dataclass
class UniformTypeKVCacheSpecs:
    """As vLLM's."""

    kv_cache_specs: dict[str, Any]


def kinds(*specs: Any, any_degree: bool = False) -> str:
    """In the form in which keyspaces have them."""
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return json.dumps(kv_kinds(SimpleNamespace(kv_cache_groups=groups), any_degree=any_degree))


@pytest.mark.parametrize(
    "other",
    [
        FullAttentionSpec(dtype="float16"),
        FullAttentionSpec(num_head_slots=16),
        FullAttentionSpec(tokens_per_state=4),
        FullAttentionSpec(sliding_window=128),
        FullAttentionSpec(num_kv_heads=4),
        MambaSpec(),
        UniformTypeKVCacheSpecs({"a": FullAttentionSpec()}),
    ],
)
def test_whatever_vllm_says_of_a_groups_layers_counts(other: Any) -> None:
    assert kinds(other) != kinds(FullAttentionSpec())
    assert kinds(other) == kinds(other)


def test_states_of_one_size_that_are_arranged_otherwise_are_told_apart() -> None:
    states = [
        MambaSpec(),
        MambaSpec(shapes=((512, 3), (4, 64, 64))),  # VLLM_SSM_CONV_STATE_LAYOUT
        MambaSpec(dtypes=("float16", "float32")),
    ]
    assert len({kinds(one) for one in states}) == len(states)


def test_where_all_tp_degrees_have_the_same_bytes_their_heads_do_not_count() -> None:
    one, two = FullAttentionSpec(), FullAttentionSpec(num_kv_heads=4)
    assert kinds(one, any_degree=True) == kinds(two, any_degree=True) != kinds(MambaSpec(), any_degree=True)
    uniform = [UniformTypeKVCacheSpecs({"a": spec}) for spec in (one, two)]
    assert kinds(uniform[0], any_degree=True) == kinds(uniform[1], any_degree=True)


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 1024}


def parts(*, rope: dict[str, Any] | None = None, **more: Any) -> str:
    config = configured(text_config={"rope_parameters": rope} if rope else None, **more)
    return json.dumps(model_parts(config))


@pytest.mark.parametrize(
    "other",
    [
        {"rope": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
        {"rope": {"rope_theta": 5e5}},
        {"overrides": {"attention_bias": True}},
        {"quantization": "fp8"},
        {"load_format": "dummy"},
        {"drafter": a_drafter()},
    ],
)
def test_whatever_changes_the_kv_of_equal_weights_counts(other: dict[str, Any]) -> None:
    assert parts(**other) != parts()
    assert parts(**other) == parts(**other)


def test_the_length_counts_where_the_rotary_embeddings_take_it() -> None:
    assert parts(rope=LONG, max_model_len=1024) != parts(rope=LONG, max_model_len=4096)
    assert parts(rope=LONG, max_model_len=2048) == parts(rope=LONG, max_model_len=4096)
    assert parts(max_model_len=1024) == parts(max_model_len=4096)


def test_drafters_without_kv_do_not_count() -> None:
    assert parts(drafter=a_drafter("ngram")) == parts()
