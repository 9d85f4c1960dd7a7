"""Models of two layers with random weights, which no file or hub is needed for."""

from typing import Any

import torch
import transformers

VOCABULARY = 97


def tiny(model_class: str, config_class: str, **settings: Any) -> Any:
    """A model of 2 layers, 4 query heads and 2 KV heads x 16, float32 unless settings say otherwise."""
    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    config = getattr(transformers, config_class)(**{**base, **settings})
    with torch.random.fork_rng(devices=[]):  # the CPU's generator alone
        torch.manual_seed(0)
        model = getattr(transformers, model_class)(config)
        # Weights as usual make a random model repeat its last token, whatever came before. These keep activations at
        # unit size and let few tokens dominate, so that a wrong chunk changes tokens.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                gain = 2.0 if any(part in name for part in ("q_proj", "k_proj", "c_attn")) else 1.0
                width = 1 if "embed" in name or "wte" in name else parameter.shape[1]
                parameter.data.normal_(std=gain / width**0.5)
    return model.eval()


def tiny_llama(**settings: Any) -> Any:
    """The usual one."""
    return tiny("LlamaForCausalLM", "LlamaConfig", **settings)


def prompt(token_count: int, seed: int = 0) -> torch.Tensor:
    """[1, token_count] token ids."""
    return torch.randint(0, VOCABULARY, (1, token_count), generator=torch.Generator().manual_seed(seed))


def padded(*rows: torch.Tensor, pad: int = 0) -> dict[str, torch.Tensor]:
    """Rows [1, tokens] of different lengths as a tokenizer hands them out that pads on the left."""
    width = max(row.shape[1] for row in rows)
    ids = [torch.cat([torch.full((1, width - row.shape[1]), pad), row], dim=1) for row in rows]
    masks = [torch.cat([torch.zeros((1, width - row.shape[1])), torch.ones_like(row)], dim=1).long() for row in rows]
    return {"input_ids": torch.cat(ids), "attention_mask": torch.cat(masks)}
