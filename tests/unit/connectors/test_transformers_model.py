"""Which models are served, and by what name others are refused."""

import re
from typing import Any

import pytest

from kvpool.connectors.transformers_model import memory_digest, model_name, shared_model, unsupported
from kvpool.core.errors import GeometryUnsupported, InvalidRequest
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from tests.unit.connectors.tiny_models import tiny, tiny_llama


def spec_of(model: Any) -> KeyspaceSpec:
    return shared_model(model, model_id="tiny", model_revision="1", chunk_tokens=64).spec


@pytest.mark.parametrize(
    ("model_class", "config_class", "settings", "group"),
    [
        ("LlamaForCausalLM", "LlamaConfig", {}, KvGroup(2, 2, 16)),
        ("LlamaForCausalLM", "LlamaConfig", {"head_dim": 32}, KvGroup(2, 2, 32)),
        ("MistralForCausalLM", "MistralConfig", {"sliding_window": None}, KvGroup(2, 2, 16)),
        ("MistralForCausalLM", "MistralConfig", {"sliding_window": 8}, KvGroup(2, 2, 16)),
        ("Gemma2ForCausalLM", "Gemma2Config", {"head_dim": 8}, KvGroup(2, 2, 8)),
        ("Qwen2ForCausalLM", "Qwen2Config", {"sliding_window": 8, "use_sliding_window": False}, KvGroup(2, 2, 16)),
        ("GemmaForCausalLM", "GemmaConfig", {"head_dim": 8}, KvGroup(2, 2, 8)),
        ("GPT2LMHeadModel", "GPT2Config", {"num_key_value_heads": None}, KvGroup(2, 4, 16)),
        ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 2, "sliding_window": None}, KvGroup(2, 2, 16)),
    ],
)
def test_the_geometry_of_served_models(
    model_class: str, config_class: str, settings: dict[str, Any], group: KvGroup
) -> None:
    spec = spec_of(tiny(model_class, config_class, **settings))
    assert (spec.groups, spec.dtype, spec.chunk_tokens) == ((group,), Dtype.FP32, 64)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", Dtype.BF16), ("float16", Dtype.FP16)])
def test_the_element_type_is_that_of_the_cache(dtype: str, expected: Dtype) -> None:
    import torch

    assert spec_of(tiny_llama().to(getattr(torch, dtype))).dtype is expected


MLA = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("model_class", "config_class", "settings", "what"),
    [
        ("Llama4ForCausalLM", "Llama4TextConfig", {}, "chunked local attention (chunks of 8192 tokens)"),
        ("MambaForCausalLM", "MambaConfig", {}, "linear-attention or state-space layers"),
        ("RwkvForCausalLM", "RwkvConfig", {}, "a recurrent state (state-space or linear-attention layers)"),
        ("Qwen3NextForCausalLM", "Qwen3NextConfig", {"num_hidden_layers": 4}, "a hybrid model"),
        ("DeepseekV3ForCausalLM", "DeepseekV3Config", MLA, "multi-head latent attention (MLA)"),
        (
            "LlamaForCausalLM",
            "LlamaConfig",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary embeddings that depend on the prompt's length (rope_type dynamic)",
        ),
        (
            "GPTNeoForCausalLM",
            "GPTNeoConfig",
            {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_heads": 4},
            "local (sliding-window) attention layers",
        ),
    ],
)
@pytest.mark.slow
def test_other_models_are_refused_by_name(
    model_class: str, config_class: str, settings: dict[str, Any], what: str
) -> None:
    model = tiny(model_class, config_class, **settings)
    with pytest.raises(GeometryUnsupported) as refused:
        spec_of(model)
    message = str(refused.value)
    assert f"({model_class}) has " in message
    assert what in message
    assert message.endswith("run this model without kvpool")
    assert message.startswith(f"model {model.config.model_type} ")


def test_an_encoder_decoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    assert unsupported(model) == "an encoder beside its decoder"


def test_a_model_that_is_split_over_devices_is_refused() -> None:
    model = tiny_llama()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert unsupported(model) == "layers on several devices"


def test_a_cache_that_is_not_what_the_config_says_is_refused() -> None:
    model = tiny_llama()
    model.config.num_key_value_heads = 4
    with pytest.raises(GeometryUnsupported, match=r"keys of layer 0 in shape \(1, 2, 1, 16\)"):
        spec_of(model)
    model = tiny("GPT2LMHeadModel", "GPT2Config", num_key_value_heads=[1, 2])
    with pytest.raises(GeometryUnsupported, match="differ by layer"):
        spec_of(model)


def test_a_bad_chunk_size_is_named() -> None:
    with pytest.raises(InvalidRequest, match="chunk_tokens"):
        shared_model(tiny_llama(), model_id="tiny", model_revision="1", chunk_tokens=100)


def test_the_digest_distinguishes_models() -> None:
    digest = memory_digest(tiny_llama())
    assert digest == memory_digest(tiny_llama())
    assert len(digest) == 32
    changed = tiny_llama()
    changed.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1e-3
    others = [changed, tiny_llama(rms_norm_eps=1e-3), tiny_llama().bfloat16()]
    assert len({digest, *(memory_digest(other) for other in others)}) == 4


@pytest.mark.parametrize("model_id", ["tiny", "org/Model-7B", "C:\\models@home/a b", "x" * 300])
def test_the_default_name_is_one_that_the_index_takes(model_id: str) -> None:
    model = tiny_llama()
    specs = [
        shared_model(model, model_id=model_id, model_revision="1" * 32, chunk_tokens=chunk_tokens, salt=salt)
        for chunk_tokens, salt in ((64, b""), (256, b""), (256, b"s" * 16))
    ]
    names = [spec.keyspace_name for spec in specs]
    assert all(re.fullmatch(r"[A-Za-z0-9._:/-]{1,128}", name) for name in names)
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("source", "name"), [("org/Model-7B", "org/Model-7B"), ("/data/models/Model-7B/", "Model-7B"), ("", "llama")]
)
def test_a_model_of_a_directory_has_the_directorys_name(source: str, name: str) -> None:
    model = tiny_llama()
    model.config.name_or_path = source
    assert model_name(model) == name
