"""Models with fixed random weights, one for each way in which vLLM keeps KV or state. A wrong chunk changes tokens."""

from __future__ import annotations

from collections.abc import Sequence
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


def _save_random(
    directory: Path, kind: str, config_class: str, *, layer_types: Sequence[str], expert_inputs: int = -1, **sizes: Any
) -> Path:
    """Save a model of that kind, 256 wide, in the config's dtype. expert_inputs: the dimension of its experts' weights
    that is summed over."""
    import torch
    import transformers

    config = getattr(transformers, config_class)(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        **sizes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
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
        inputs = parameter.shape[expert_inputs if parameter.dim() == 3 else -1]
        parameter.data.normal_(std=gain / inputs**0.5)
