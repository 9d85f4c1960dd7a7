"""A model in one form: what parts two of them, and what is only another spelling."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.core.keyspace import Codec, Dtype
from kvpool.core.model import Model, normalized_rope


def model(**changes: Any) -> Model:
    values: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 16} | changes
    return Model("tiny", "1", **values)


def test_a_plain_model_has_no_salt() -> None:
    assert model().spec.salt == b""
    assert model(rope={"rope_theta": 10000, "rope_scaling": None}, adapters=[], quantization=None).spec.salt == b""
    assert model(dtype="bfloat16").spec == model(dtype=Dtype.BF16).spec == model().spec


def test_whatever_changes_the_kv_parts_models() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"rope": {"rope_theta": 1e6}},
        {"quantization": "fp8"},
        {"adapters": ["a"]},
        {"variant": ["v"]},
        {"salt": "v"},
        {"salt": b"v"},
        {"salt": b"v".hex()},
        {"variant": [b"v".hex()]},
        {"dtype": "fp16"},
        {"codec": "int8_group8"},
        {"chunk_tokens": 64},
    ]
    assert len({model(**change).spec for change in changes}) == len(changes)
    assert model(adapters=["a", "b"]).spec == model(adapters=["b", "a"]).spec
    assert model(codec="fp8_e4m3").spec.codec is Codec.FP8_E4M3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e6}}},
            {"rope_theta": 1000000},
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": None}}, {}),
    ],
)
def test_spellings_of_rotary_embeddings(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert normalized_rope(one) == normalized_rope(other)


def test_rotary_embeddings_that_differ() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    found: list[dict[str, Any]] = [
        {},
        {"rope_theta": 1e6},
        {"rope_parameters": yarn},
        {"rope_parameters": yarn | {"factor": 8.0}},
    ]
    assert len({str(normalized_rope(one)) for one in found}) == 4


def test_rotary_embeddings_that_are_spelled_to_look_alike() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    layers = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e6}}
    image = {"rope_type": "default", "mrope_section": [16, 24, 24]}
    found: list[dict[str, Any]] = [
        {},
        {"rope_scaling": yarn | {"type": "default"}},  # an engine takes rope_type where both are given
        {"rope_parameters": layers},
        {"rope_parameters": layers | yarn},  # for all kinds of layers
        {"rope_parameters": layers | yarn | {"factor": 8.0}},
        {"rope_parameters": image},
        {"rope_parameters": image | {"mrope_section": [24, 20, 20]}},
    ]
    assert len({str(normalized_rope(one)) for one in found}) == len(found)
    assert normalized_rope({"rope_scaling": {"type": "default"} | yarn}) == normalized_rope(found[1])
    assert normalized_rope({"rope_scaling": {"full_attention": {}}}) == {}


def test_the_name_is_one_that_the_index_takes_and_differs_with_the_model() -> None:
    names = {model(**change).keyspace_name for change in ({}, {"quantization": "x"}, {"dtype": "fp16"})}
    names.add(Model("org/Model-7B home/a b" * 9, "1" * 64, layers=2, latent_dim=64).keyspace_name)
    assert len(names) == 4
    assert all(re.fullmatch(r"[A-Za-z0-9._:/-]{1,128}", name) for name in names)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(InvalidRequest, match="adapters"):
        model(adapters="abc")  # its letters would be sorted
    with pytest.raises(InvalidRequest, match="latent_dim"):
        Model("tiny", "1", layers=2)
    with pytest.raises(InvalidRequest, match="dtype must be one of"):
        model(dtype="float7")
    with pytest.raises(InvalidRequest, match="chunk_tokens"):
        model(chunk_tokens=100)
