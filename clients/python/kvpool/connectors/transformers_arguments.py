"""Which arguments of `model.generate` can be served with shared prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.core.errors import InvalidRequest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Arguments of `generate` that are no fields of a GenerationConfig and do not touch the cache.
_HARMLESS = (
    "attention_mask",
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
    "tokenizer",
)
# Values of generation settings that keep to one sequence and one plain cache.
_WANTED: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "token_healing": (None, False),
}


def check_arguments(model: PreTrainedModel, input_ids: torch.Tensor, arguments: dict[str, Any]) -> None:
    """raises: InvalidRequest naming the argument and what to do."""
    from transformers import GenerationConfig

    if model.training:
        raise InvalidRequest("the model is in training mode, where its KV is random; call model.eval() first")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise InvalidRequest(
            f"input_ids must have shape [1, tokens], got {list(input_ids.shape)}; batches are not served yet: "
            "call generate once for each sequence"
        )
    if not input_ids.shape[1]:
        raise InvalidRequest("input_ids must have at least one token")
    mask = arguments.get("attention_mask")
    if mask is not None and (mask.shape != input_ids.shape or not bool((mask == 1).all())):
        raise InvalidRequest("attention_mask must be all ones: padding is not served yet; leave the padding out")
    settings = {**GenerationConfig().to_dict(), **_WANTED}
    for name in arguments:
        if name not in settings and name not in _HARMLESS:
            raise InvalidRequest(f"{name} is not served with shared prefixes; call model.generate itself")
    for name, wanted in _WANTED.items():
        value = _setting(model, arguments, name)
        if not any(value is good or value == good for good in wanted):
            raise InvalidRequest(f"{name}={value!r} is not served with shared prefixes; call model.generate itself")


def _setting(model: PreTrainedModel, arguments: dict[str, Any], name: str) -> object:
    """As `generate` resolves it: argument, then the given config, then the model's."""
    if name in arguments:
        return arguments[name]
    for config in (arguments.get("generation_config"), model.generation_config):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None
