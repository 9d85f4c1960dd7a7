"""The model of `bench.ttft_gpu`, and how one prompt's first token is timed on it."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from kvpool.connectors.first_token import FirstTokenTimer

VOCABULARY = 4096
SEED = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a Llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


SHAPES = {
    "8b": Shape(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, dtype=torch.bfloat16),
    # To see that everything works, also on a CPU.
    "tiny": Shape(layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=256, dtype=torch.float32),
}


def build_model(shape: Shape, device: str) -> Any:
    """A LlamaForCausalLM with random weights that are the same in every process on the same kind of device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="sdpa",
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(usual)
    _fill(model, device)
    model.eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    return model


def _fill(model: torch.nn.Module, device: str) -> None:
    """Weights that keep activations at unit size; queries and keys larger, so that few tokens dominate."""
    generator = torch.Generator(device=device).manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
            scale = 1.0 if "embed_tokens" in name else gain / math.sqrt(parameter.shape[1])
            parameter.normal_(0.0, scale, generator=generator)


def prompt_of(token_count: int, last_token: int, device: str) -> torch.Tensor:
    """[1, token_count + 1] ids: a prefix of its own, and one token to compute.

    No two prompts share a prefix: what is computed on top of loaded chunks differs in its last bits from what is
    computed in one go.
    """
    generator = torch.Generator().manual_seed(SEED + token_count)
    prefix = torch.randint(0, VOCABULARY, (token_count,), generator=generator)
    return torch.cat([prefix, torch.tensor([last_token])]).unsqueeze(0).to(device)


def recompute(model: Any, prompt: torch.Tensor, count: int) -> tuple[list[float], int]:
    """TTFT in ms of `count` runs of the model alone, after one more to warm up, and the token."""
    samples: list[float] = []
    token = -1
    for _ in range(count + 1):
        synchronize(prompt)
        timer = FirstTokenTimer()
        started_s = time.perf_counter()
        sequences = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=1, do_sample=False, streamer=timer
        )
        assert timer.at_s is not None, "generation without a token"
        samples.append((timer.at_s - started_s) * 1e3)
        token = int(sequences[0, -1])
    return samples[1:], token


def next_logits(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """[vocabulary] float32 after ids [1, n] behind what the cache holds; the cache grows."""
    with torch.no_grad():
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return output.logits[0, -1].float()  # type: ignore[no-any-return]


def fingerprint(cache: Any, token_count: int) -> list[int]:
    """A 64-bit sum over the bytes of the first tokens of each layer's keys and values, each word with its own factor.

    Integers, so the order of addition does not matter: equal for equal bytes, and hardly ever else.
    """
    sums: list[int] = []
    for layer in cache.layers:
        for rows in (layer.keys, layer.values):
            words = rows[:, :, :token_count].contiguous().view(torch.int64).flatten()
            factors = torch.arange(words.numel(), device=words.device) * 2_654_435_761 * 2 + 1
            sums.append(int((words * factors).sum()))
    return sums


def synchronize(tensor: torch.Tensor) -> None:
    """Wait for the tensor's GPU, if it has one."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def median_ms(samples: list[float]) -> float:
    """For reports."""
    return round(statistics.median(samples), 2)
