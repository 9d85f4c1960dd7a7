"""The demo's language model: a small Llama with fixed weights made here, or any Hugging Face causal LM.

Nothing may be downloaded, so the default weights are random. They are drawn from raw PCG64 output, which NumPy
guarantees never to change, and not from torch: the same seed gives the same bits in every process and torch version.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import blake3
import numpy as np
import torch
from numpy.typing import NDArray

from demo.tokenizer import ChatTokenizer, CorpusTokenizer, HubTokenizer

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedModel

DEFAULT_MODEL_NAME = "kvpool-demo-llama"
# Queries and keys get this much more than unit scale. At unit scale the attention of a random model is close to an
# average over all tokens, which looks alike for every text; here a few tokens dominate. At 1.6 one wrong page of 16
# tokens in 2,200 left a reply of 16 tokens unchanged in 4 trials of 31, at 2.0 in none: equal tokens mean equal KV.
ATTENTION_GAIN = 2.0


class DemoModel(NamedTuple):
    """A causal LM that is ready to generate."""

    model: PreTrainedModel
    tokenizer: ChatTokenizer
    name: str
    revision: str  # 16 hex digits of a hash over all weights: equal only for equal weights


def build_model(model: str | None, seed: int, device: str = "cpu") -> DemoModel:
    """Make the default model, or load `model` (a local directory or a hub id) with transformers.

    model: None for the default; `seed` matters only then.
    Either way: float32 (in bfloat16 near-ties between tokens are common, and equal tokens would be luck), made on the
    CPU and moved to `device`, evaluation mode, and no end-of-sequence token, so that every reply has the same length.
    Raises OSError when transformers cannot find `model`.
    """
    language_model, tokenizer = _make_default(seed) if model is None else _load(model)
    language_model.eval().requires_grad_(False)
    language_model.generation_config.eos_token_id = None
    name = model if model is not None else f"{DEFAULT_MODEL_NAME}-{seed}"
    revision = weights_revision(language_model)
    return DemoModel(language_model.to(device), tokenizer, name, revision)


def weights_revision(model: torch.nn.Module) -> str:
    """16 hex digits of BLAKE3 over name, dtype, shape and content of every parameter, sorted by name."""
    hasher = blake3.blake3()
    for name, parameter in sorted(model.named_parameters()):
        hasher.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        hasher.update(parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest(length=8)


def _make_default(seed: int) -> tuple[PreTrainedModel, ChatTokenizer]:
    from transformers import LlamaForCausalLM

    tokenizer = CorpusTokenizer()
    model = LlamaForCausalLM(_default_config(tokenizer.vocabulary_size))
    _fill_weights(model, seed)
    return model, tokenizer


def _default_config(vocabulary_size: int) -> LlamaConfig:
    """Heavy enough that computing 2,300 tokens takes far longer than loading their KV (16 KiB a token)."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=3,
        dtype="float32",
    )


def _fill_weights(model: torch.nn.Module, seed: int) -> None:
    """Overwrite every parameter: norms with 1, all others with uniform noise of zero mean, in order of their names."""
    bit_generator = np.random.PCG64(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            noise = _uniform_noise(bit_generator, parameter.numel(), _standard_deviation(name, parameter.shape[1]))
            parameter.copy_(torch.from_numpy(noise).view_as(parameter))


def _standard_deviation(name: str, input_width: int) -> float:
    """The scale that keeps activations at unit size through a weight of shape [outputs, input_width]."""
    if "embed_tokens" in name:
        return 1.0
    gain = ATTENTION_GAIN if "q_proj" in name or "k_proj" in name else 1.0
    return gain / math.sqrt(input_width)


def _uniform_noise(bit_generator: np.random.PCG64, count: int, standard_deviation: float) -> NDArray[np.float32]:
    """[count] float32, uniform with zero mean, exact in every step but the last multiplication."""
    words = bit_generator.random_raw((count + 1) // 2).astype("<u8", copy=False)
    steps = (words.view("<u4")[:count] >> np.uint32(8)).astype(np.float32)  # 24 bits: exact in float32
    steps -= np.float32(2**23)
    # A uniform distribution over [-h, h) has the standard deviation h / sqrt(3).
    steps *= np.float32(standard_deviation * math.sqrt(3.0) / 2**23)
    return steps


def _load(model: str) -> tuple[PreTrainedModel, ChatTokenizer]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    language_model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return language_model, HubTokenizer(AutoTokenizer.from_pretrained(model))
