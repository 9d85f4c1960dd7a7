"""Models with fixed random weights, one for each way in which vLLM keeps KV or state. A wrong chunk changes tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VOCABULARY = 2048


def make_model(directory: Path, *, layers: int = 4, width: int = 256, heads: int = 4, kv_heads: int = 2) -> Path:
    """Save a Llama: full attention in all layers."""
    from tests.unit.connectors.tiny_models import tiny_llama

    model = tiny_llama(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
    )
    model.save_pretrained(directory)
    return directory


def make_windowed_model(directory: Path, *, window_tokens: int = 160, full_layers: Sequence[int] = (1, 5)) -> Path:
    """Save a Gemma 3 of 6 layers, all but some of them with a sliding window. vLLM makes KV cache groups of two layers
    each: two of windows, one of full attention."""
    return _save_random(
        directory,
        "Gemma3",
        "Gemma3TextConfig",
        intermediate_size=512,
        head_dim=64,
        sliding_window=window_tokens,
        query_pre_attn_scalar=64,
        layer_types=["full_attention" if number in full_layers else "sliding_attention" for number in range(6)],
    )


def make_sinks_model(directory: Path, *, window_tokens: int = 160) -> Path:
    """Save a gpt-oss of 4 layers, every other with a sliding window, all with attention sinks. vLLM makes two KV cache
    groups: of windows, and of full attention."""
    return _save_random(
        directory,
        "GptOss",
        "GptOssConfig",
        expert_inputs=1,
        intermediate_size=256,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=window_tokens,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    )


def make_mamba_model(directory: Path) -> Path:
    """Save a Granite hybrid: four Mamba 2 layers, two of attention. vLLM makes KV cache groups of two layers each: two
    of recurrent state, one of full attention."""
    return _save_random(
        directory,
        "GraniteMoeHybrid",
        "GraniteMoeHybridConfig",
        intermediate_size=512,
        shared_intermediate_size=512,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=32,
        mamba_expand=2,
        mamba_chunk_size=64,
        layer_types=["mamba", "attention", "mamba", "mamba", "attention", "mamba"],
        attention_multiplier=0.125,
        position_embedding_type="rope",
    )


def make_delta_net_model(directory: Path) -> Path:
    """Save a Qwen3-Next: three layers of a gated delta net, one of attention, each of them a KV cache group in vLLM.
    vLLM's CPU build computes it in bfloat16 only, and with a mixture of experts."""
    return _save_random(
        directory,
        "Qwen3Next",
        "Qwen3NextConfig",
        intermediate_size=512,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        dtype="bfloat16",
    )


def make_mla_model(directory: Path, *, layers: int = 3) -> Path:
    """Save a DeepSeek V3 of dense layers with multi-head latent attention, and behind them one layer for multi-token
    prediction, which vLLM loads as a drafter only. The latent has DeepSeek's size: vLLM's CPU kernels know no other."""
    from safetensors.torch import load_file, save_file

    _save_random(
        directory,
        "DeepseekV3",
        "DeepseekV3Config",
        layer_types=["full_attention"] * (layers + 1),
        intermediate_size=512,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=128,  # of the sizes that vLLM has kernels for on GPUs
        first_k_dense_replace=layers + 1,
        # As DeepSeek's. With plain ones vLLM 0.32's CPU kernel turns the wrong elements of queries.
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    )
    weights, mtp = load_file(directory / "model.safetensors"), f"model.layers.{layers}"
    unit = weights["model.norm.weight"]
    weights["model.embed_tokens.weight"] *= 2.0 * len(unit) ** 0.5  # so that tokens themselves say much of what follows
    weights |= {
        f"{mtp}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{mtp}.shared_head.head.weight": weights["lm_head.weight"].clone(),
        f"{mtp}.eh_proj.weight": _mostly_embeddings(unit),
        **{f"{mtp}.{norm}.weight": unit.clone() for norm in ("enorm", "hnorm", "shared_head.norm")},
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    _change_config(directory, num_hidden_layers=layers, num_nextn_predict_layers=1, layer_types=None)
    return directory


def make_eagle_drafter(directory: Path, model: Path) -> Path:
    """Save an EAGLE drafter of one layer for a model that `make_model` has saved, of its shapes."""
    from safetensors.torch import load_file, save_file

    shapes = json.loads((model / "config.json").read_text())
    make_model(
        directory,
        layers=1,
        width=shapes["hidden_size"],
        heads=shapes["num_attention_heads"],
        kv_heads=shapes["num_key_value_heads"],
    )
    weights, theirs = load_file(directory / "model.safetensors"), load_file(model / "model.safetensors")
    kept = {
        name.removeprefix("model."): tensor
        for name, tensor in weights.items()
        if name.startswith("model.layers.") and "input_layernorm" not in name  # of which EAGLE's first layer has none
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        kept[f"layers.0.{name}.weight"] *= 0.5
    drafter = {
        **kept,
        "fc.weight": _mostly_embeddings(theirs["model.norm.weight"]),
        "embed_tokens.weight": theirs["model.embed_tokens.weight"],
    }
    save_file(drafter, directory / "model.safetensors", {"format": "pt"})
    return directory


def make_eagle3_drafter(directory: Path, model: Path) -> Path:
    """Save an EAGLE 3 drafter of one layer, as `make_eagle_drafter`: its attention reads embeddings beside states of
    three of the model's layers."""
    from safetensors.torch import load_file, save_file

    make_eagle_drafter(directory, model)
    weights, theirs = load_file(directory / "model.safetensors"), load_file(model / "model.safetensors")
    unit = theirs["model.norm.weight"]
    width = len(unit)
    midlayer = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.items() if "layers" in name}
    drafter = {
        **midlayer,
        "fc.weight": unit.new_empty(width, 3 * width),
        **{f"midlayer.{norm}.weight": unit.clone() for norm in ("input_layernorm", "hidden_norm")},
        "norm.weight": unit,
        "lm_head.weight": theirs["lm_head.weight"],
    }
    with _fixed_seed():
        for name in ("fc", *(f"midlayer.self_attn.{part}_proj" for part in "qkv")):
            outputs, gain = len(drafter[f"{name}.weight"]), 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            inputs = (3 if name == "fc" else 2) * width
            drafter[f"{name}.weight"] = unit.new_empty(outputs, inputs).normal_(std=gain / inputs**0.5)
    save_file(drafter, directory / "model.safetensors", {"format": "pt"})
    _change_config(
        directory,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=VOCABULARY,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],  # vLLM's own choice has two of four layers twice
    )
    return directory


def _mostly_embeddings(unit: Any) -> Any:
    """Weights of a drafter that reads embeddings and states: some of its drafts are accepted, as the model's next token
    follows from the last one more often than not."""
    import torch

    width = len(unit)
    with _fixed_seed():
        return torch.cat([2.0 * torch.eye(width), torch.randn(width, width) * 0.3 / width**0.5], dim=1)


def _change_config(directory: Path, **changes: Any) -> None:
    """Set values of a saved model's config; None takes one out."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@contextmanager
def _fixed_seed() -> Iterator[None]:
    import torch

    with torch.random.fork_rng(devices=[]):  # the CPU's generator alone
        torch.manual_seed(0)
        yield


def _save_random(
    directory: Path, kind: str, config_class: str, *, layer_types: Sequence[str], expert_inputs: int = -1, **sizes: Any
) -> Path:
    """Save a model of that kind, 256 wide, in the config's dtype. expert_inputs: the dimension of its experts' weights
    that is summed over."""
    import torch
    import transformers

    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    config = getattr(transformers, config_class)(**{**base, **sizes})
    with _fixed_seed():
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            _draw(name, parameter, expert_inputs)
    if sizes.get("dtype"):
        model.to(getattr(torch, sizes["dtype"]))
    model.save_pretrained(directory)
    return directory


def _draw(name: str, parameter: Any, expert_inputs: int) -> None:
    """Large weights, as in tiny_models, and states that fade over hundreds of tokens."""
    import torch

    if name.endswith("A_log"):
        parameter.data.copy_(torch.linspace(-2.0, 0.0, len(parameter)))
    elif name.endswith("dt_bias"):
        parameter.data.fill_(-4.0)
    elif "sinks" in name:
        parameter.data.normal_()
    elif parameter.dim() >= 2 and "bias" not in name:
        gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
        if "q_b_proj" in name:  # of latent attention, whose keys have no weights of their own
            gain = 4.0
        inputs = parameter.shape[expert_inputs if parameter.dim() == 3 else -1]
        parameter.data.normal_(std=gain / inputs**0.5)
