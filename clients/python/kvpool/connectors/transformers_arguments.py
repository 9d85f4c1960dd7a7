"""Which arguments of `model.generate` can be served with shared prefixes, and what a call comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool.connectors.transformers_caches import check_cache
from kvpool.core.errors import InvalidRequest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_WAY_OUT = "call model.generate itself for that"
# Arguments of `generate` that are no fields of a GenerationConfig and do not touch the cache.
_HARMLESS = (
    "attention_mask",
    "generation_config",
    "logits_processor",
    "past_key_values",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "tokenizer",
)
# Values of generation settings that keep one plain cache, in which a row stays where it is.
_WANTED: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic", "static"),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "token_healing": (None, False),
}
_WHY = {
    "num_beams": "beam search moves rows about in the cache; use num_beams=1, or ",
    "cache_implementation": 'only "dynamic" and "static" caches can begin with shared chunks; use one of them, or ',
}
_NEW_TOKENS_DEFAULT = 20  # as transformers has it, if nothing says how many


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """One call of `generate`.

    input_ids, attention_mask: [rows, columns]; several sequences of one prompt are rows of their own.
    cache: the caller's, empty, or None. needed_tokens: columns that prompt and new tokens take in the end.
    eos_tokens: that end a row. arguments: what is left to hand on.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    cache: Any
    cache_implementation: str | None
    needed_tokens: int
    eos_tokens: tuple[int, ...]
    arguments: dict[str, Any]

    @property
    def padded(self) -> bool:
        """Whether a row has padding."""
        return not bool(self.attention_mask.all())

    @property
    def streamed(self) -> bool:
        """Whether the model can begin while the prefix comes in: one row in a cache that grows anyway."""
        growing = self.cache is None and self.cache_implementation != "static"
        return growing and self.input_ids.shape[0] == 1 and not self.padded


def check_arguments(model: PreTrainedModel, input_ids: torch.Tensor, arguments: dict[str, Any]) -> CheckedCall:
    """raises: InvalidRequest naming the argument and what to do."""
    if model.training:
        raise InvalidRequest("the model is in training mode, where its KV is random; call model.eval() first")
    _check_tokens(model, input_ids)
    _check_settings(model, arguments)
    left = dict(arguments)
    mask = _checked_mask(model, input_ids, left.pop("attention_mask", None), left)
    # Rows of their own, so that each has its place in the cache; transformers would repeat the tokens, not the cache.
    copies = _setting(model, left, "num_return_sequences") or 1
    left["num_return_sequences"] = 1
    input_ids, mask = input_ids.repeat_interleave(copies, dim=0), mask.repeat_interleave(copies, dim=0)
    needed_tokens = _needed_tokens(model, input_ids.shape[1], left)
    cache, implementation = left.pop("past_key_values", None), left.pop("cache_implementation", None)
    if cache is not None:
        if implementation is not None:
            raise InvalidRequest("pass either past_key_values or cache_implementation, not both")
        check_cache(cache, input_ids.shape[0], needed_tokens)
    eos = _setting(model, left, "eos_token_id")
    eos_tokens = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),)
    return CheckedCall(input_ids, mask, cache, implementation, needed_tokens, eos_tokens, left)


def _check_tokens(model: PreTrainedModel, input_ids: torch.Tensor) -> None:
    if input_ids.dim() != 2 or not input_ids.shape[0]:
        raise InvalidRequest(
            f"input_ids must have shape [rows, tokens], got {list(input_ids.shape)}; a single prompt is one row"
        )
    if not input_ids.shape[1]:
        raise InvalidRequest("input_ids must have at least one token")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.element_size() < 4:
        raise InvalidRequest(f"input_ids must be token ids of type torch.long, got {input_ids.dtype}")
    if input_ids.device != model.device:
        raise InvalidRequest(
            f"input_ids are on {input_ids.device}, the model is on {model.device}; "
            "move them: inputs = inputs.to(model.device)"
        )


def _checked_mask(
    model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor | None, arguments: dict[str, Any]
) -> torch.Tensor:
    """Of ones and, on the left, zeros, on the model's device."""
    import torch

    if mask is None:
        pad = _setting(model, arguments, "pad_token_id")
        if input_ids.shape[0] > 1 and pad is not None and bool((input_ids[:, 0] == pad).any()):
            raise InvalidRequest(
                f"a row begins with the padding token ({pad}) and there is no attention_mask to say what it is; pass "
                "the tokenizer's: generate(**inputs)"
            )
        return torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise InvalidRequest(
            f"attention_mask must have the shape of input_ids {list(input_ids.shape)}, got {list(mask.shape)}"
        )
    mask = mask.to(input_ids)
    if bool(((mask != 0) & (mask != 1)).any()):
        raise InvalidRequest("attention_mask must be of zeros (padding) and ones (tokens)")
    if bool((mask[:, -1] == 0).any()) or bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise InvalidRequest(
            "attention_mask has padding behind a token or a row without tokens; pad on the left: "
            'tokenizer.padding_side = "left"'
        )
    return mask


def _check_settings(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    settings = {**GenerationConfig().to_dict(), **_WANTED}
    for name in arguments:
        if name not in settings and name not in _HARMLESS:
            raise InvalidRequest(f"{name} is not served with shared prefixes; {_WAY_OUT}")
    for name, wanted in _WANTED.items():
        value = _setting(model, arguments, name)
        if not any(value is good or value == good for good in wanted):
            why = _WHY.get(name, "")
            raise InvalidRequest(f"{name}={value!r} is not served with shared prefixes: {why}{_WAY_OUT}")
    given = {name: value for name, value in arguments.items() if name != "cache_implementation"}
    in_config = _setting(model, given, "cache_implementation")
    if in_config is not None:  # transformers refuses it beside the cache that the prefix is put into
        raise InvalidRequest(
            f"cache_implementation={in_config!r} is set in a generation config; set it to None there and pass it to "
            "generate instead"
        )


def _needed_tokens(model: PreTrainedModel, width: int, arguments: dict[str, Any]) -> int:
    new_tokens = _setting(model, arguments, "max_new_tokens")
    if isinstance(new_tokens, int):
        return width + new_tokens
    length = _setting(model, arguments, "max_length")
    return max(width + 1, length) if isinstance(length, int) else width + _NEW_TOKENS_DEFAULT


def _setting(model: PreTrainedModel, arguments: dict[str, Any], name: str) -> Any:
    """As `generate` resolves it: argument, then the given config, then the model's."""
    if arguments.get(name) is not None:
        return arguments[name]
    for config in (arguments.get("generation_config"), model.generation_config):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None
