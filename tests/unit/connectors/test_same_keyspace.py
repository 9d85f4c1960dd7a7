"""Engines that hash tokens find each other's pages: one keyspace and one hash for the same weights."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kvpool
from kvpool.client.checkpoint import tensor_windows
from kvpool.client.hashing import Prompt
from kvpool.connectors.transformers_model import shared_model
from kvpool.connectors.vllm.identity import KvCacheInfo, model_spec
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.core.keyspace import KeyspaceSpec, derive_hash_key, encode_keyspace, keyspace_id
from tests.unit.connectors.tiny_models import tiny_llama

TOKENS = list(range(700))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm")
    module.__version__ = "9.9"
    monkeypatch.setitem(sys.modules, "vllm", module)


def by_vllm(
    directory: Path, *, quantization: str | None = None, salt: str = "", revision: str = "", **overrides: Any
) -> KeyspaceSpec:
    """As vLLM's connector describes it, of what is read of its configuration."""
    config = AutoConfig.from_pretrained(directory)
    for name, value in overrides.items():
        setattr(config, name, value)
    model = SimpleNamespace(
        model=str(directory),
        dtype=torch.float32,
        quantization=quantization,
        use_mla=False,
        hf_config=config,
        hf_text_config=config,
        hf_overrides=overrides,
        max_model_len=512,
        original_max_model_len=512,
        get_total_num_hidden_layers=lambda: config.num_hidden_layers,
        get_total_num_kv_heads=lambda: config.num_key_value_heads,
        get_head_size=lambda: config.head_dim,
    )
    engine = SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="auto"))
    facts = KvCacheInfo(block_tokens=16, head_count=2, row_bytes=2 * 16 * 4, opaque=False, dtype="float32")
    return model_spec(VllmSettings(agent="unix:/a", salt=salt, model_revision=revision), engine, facts)


def by_transformers(directory: Path, *, salt: str = "", **overrides: Any) -> KeyspaceSpec:
    return shared_model(AutoModelForCausalLM.from_pretrained(directory, **overrides), salt=salt).spec


def by_api(directory: Path, *, salt: str = "", **overrides: Any) -> KeyspaceSpec:
    variant = [{"overrides": overrides}] if overrides else []
    return kvpool.checkpoint_model(directory, variant=variant, salt=salt).spec


WAYS: list[Callable[..., KeyspaceSpec]] = [by_vllm, by_transformers, by_api]


def test_the_same_weights_are_one_keyspace_and_one_chain_of_hashes(checkpoint: Path) -> None:
    specs = [way(checkpoint) for way in WAYS]
    assert specs[0] == specs[1] == specs[2]
    assert specs[0].chunk_tokens == 128
    chains = []
    for spec in specs:
        keyspace = keyspace_id(encode_keyspace("tenant", spec))
        chains.append(Prompt.of(derive_hash_key(bytes(32), keyspace), TOKENS, spec.chunk_tokens).hashes)
    assert len(chains[0]) == 5 and chains[0] == chains[1] == chains[2]


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_elsewhere_and_cut_into_other_files_is_the_same(
    way: Callable[..., KeyspaceSpec], checkpoint: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "elsewhere", max_shard_size="40KB")
    assert len(list((tmp_path / "elsewhere").glob("*.safetensors"))) > 1
    assert way(tmp_path / "elsewhere") == way(checkpoint)


def test_a_salt_and_an_overridden_setting_part_all_of_them_alike(checkpoint: Path) -> None:
    plain = by_api(checkpoint)
    for change in ({"salt": "mine"}, {"rms_norm_eps": 1e-3}):
        specs = [way(checkpoint, **change) for way in WAYS]
        assert specs[0] == specs[1] == specs[2] != plain


def test_other_rotary_embeddings_part_vllm_and_transformers_alike(checkpoint: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    assert by_vllm(checkpoint, rope_parameters=rope) == by_transformers(checkpoint, rope_parameters=rope)
    assert by_vllm(checkpoint, rope_parameters=rope) != by_vllm(checkpoint)


def test_weights_that_an_engine_quantized_itself_are_others(checkpoint: Path) -> None:
    assert by_vllm(checkpoint, quantization="fp8") != by_vllm(checkpoint)


def test_a_revision_that_was_given_does_not_join_models_of_one_shape(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "other")
    assert by_vllm(checkpoint, revision="1") != by_vllm(tmp_path / "other", revision="1")
    models = [AutoModelForCausalLM.from_pretrained(place) for place in (checkpoint, tmp_path / "other")]
    specs = [shared_model(model, model_revision="1").spec for model in models]
    assert specs[0] != specs[1]
    assert specs[0] == by_vllm(checkpoint, revision="1")


def test_a_token_that_was_trained_alone_is_seen(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    rows = model.model.embed_tokens.weight
    read = {at // 4 // rows.shape[1] for window in tensor_windows(rows.numel() * 4) for at in window}
    token = next(token for token in range(rows.shape[0]) if token not in read)
    with torch.no_grad():
        rows[token] += 1
    assert shared_model(model).spec != by_api(checkpoint)
    model.save_pretrained(tmp_path / "trained")
    assert by_api(tmp_path / "trained") != by_api(checkpoint)


def test_weights_in_memory_that_are_not_those_of_the_files_are_distinguished(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 1e-3
    assert shared_model(model).spec.model_revision != by_api(checkpoint).model_revision


def test_adapters_put_into_a_model_in_place_are_not_taken_for_its_checkpoint(checkpoint: Path) -> None:
    class AdaptedLinear(torch.nn.Module):
        """As PEFT wraps a layer."""

        __module__ = "peft.tuners.lora.layer"

        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_B = torch.nn.Parameter(torch.ones(base.out_features, base.in_features))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            adapted: torch.Tensor = self.base_layer(rows) + rows @ self.lora_B.T
            return adapted

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    attention = model.model.layers[0].self_attn
    attention.k_proj = AdaptedLinear(attention.k_proj)
    assert shared_model(model).spec != by_api(checkpoint)
