"""The digest of a checkpoint's weights: what parts them, and how much is read of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.checkpoint import checkpoint_model, tensor_windows, weights_digest
from kvpool.core.errors import InvalidRequest
from kvpool.core.keyspace import Dtype

CONFIG = {
    "model_type": "tiny",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}


def write(directory: Path, content: bytes, *, name: str = "layer", dtype: str = "U8", **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    tensor = {"dtype": dtype, "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({name: tensor}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    return directory


def test_what_is_computed_counts_and_where_it_came_from_does_not(tmp_path: Path) -> None:
    content = bytes(range(256)) * 64
    first = weights_digest(write(tmp_path / "a", content))
    assert first == weights_digest(write(tmp_path / "b", content, _name_or_path="x", transformers_version="9"))
    others = [
        weights_digest(write(tmp_path / "c", content[:-1] + b"!")),
        weights_digest(write(tmp_path / "d", b"!" + content[1:])),
        weights_digest(write(tmp_path / "e", content, name="other")),
        weights_digest(write(tmp_path / "f", content, dtype="I8")),
        weights_digest(write(tmp_path / "g", content, rms_norm_eps=1e-3)),
    ]
    assert len({first, *others}) == 6


def test_what_is_computed_beside_the_text_model_counts(tmp_path: Path) -> None:
    text: dict[str, Any] = {"text_config": CONFIG | {"_name_or_path": "here"}, "vision_feature_layer": -2}
    first = weights_digest(write(tmp_path / "a", b"weights", **text))
    moved = text | {"text_config": CONFIG | {"_name_or_path": "there"}}
    assert weights_digest(write(tmp_path / "b", b"weights", **moved)) == first
    assert weights_digest(write(tmp_path / "c", b"weights", **text | {"vision_feature_layer": -1})) != first


def test_a_bounded_part_of_each_tensor_is_read() -> None:
    assert sum(map(len, tensor_windows(100 << 30))) == 4096
    assert tensor_windows(100) == [range(100)]
    assert tensor_windows(0) == [range(0)]
    windows = tensor_windows(1_000_001)
    assert windows[0].start == 0 and windows[-1].stop > 1_000_001 - 8
    assert all(window.start % 8 == 0 for window in windows)


def test_files_of_other_kinds_are_sampled(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"weights" * 1000)
    first = weights_digest(tmp_path / "model.gguf")
    assert first == weights_digest(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"Weights" * 1000)
    assert weights_digest(tmp_path) != first
    (tmp_path / "model.gguf").unlink()
    assert weights_digest(tmp_path) is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(InvalidRequest, match=r"model\.safetensors"):
        weights_digest(tmp_path)


def test_the_model_of_a_checkpoint(tmp_path: Path) -> None:
    model = checkpoint_model(write(tmp_path, bytes(100)))
    assert (model.name, model.layers, model.kv_heads, model.head_dim) == ("tiny-2x64", 2, 2, 16)
    assert model.spec.dtype is Dtype.BF16 and model.spec.salt == b""
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        checkpoint_model(tmp_path / "absent")


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": {"type": "linear", "factor": 2.0}}])
def test_a_base_of_rotary_embeddings_that_is_not_named_is_not_guessed(tmp_path: Path, rope: dict[str, Any]) -> None:
    place = write(tmp_path, bytes(100), rope_theta=None, **rope)
    with pytest.raises(InvalidRequest, match=r"names no rope_theta.*tiny"):
        checkpoint_model(place)
    named = [checkpoint_model(place, rope={"rope_theta": theta, **rope}).spec for theta in (1e4, 5e5)]
    assert named[0] != named[1]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
    ],
)
def test_a_named_base_is_taken_in_any_spelling(tmp_path: Path, rope: dict[str, Any]) -> None:
    place = write(tmp_path, bytes(100), **rope)
    assert checkpoint_model(place).spec == checkpoint_model(place, rope={"rope_theta": 5e5}).spec


def test_where_layers_of_one_kind_have_no_named_base_it_is_not_guessed(tmp_path: Path) -> None:
    kinds = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(InvalidRequest, match="names no rope_theta"):
        checkpoint_model(write(tmp_path, bytes(100), rope_theta=None, rope_parameters=kinds))
