"""Which of transformers' caches can begin with shared chunks, and the cache for one call of `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.core.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WAY_OUT = "leave past_key_values out, or pass an empty DynamicCache or StaticCache"


def check_cache(cache: Any, batch_size: int, needed_tokens: int) -> None:
    """A cache of the caller's, for rows of needed_tokens in the end.

    raises: InvalidRequest naming the class and the way out.
    """
    from transformers import DynamicCache, StaticCache

    name = type(cache).__name__
    if type(cache) not in (DynamicCache, StaticCache):
        raise InvalidRequest(f"past_key_values is a {name}, which cannot hold shared chunks; {_WAY_OUT}")
    if cache.offloading:
        raise InvalidRequest(f"past_key_values is a {name} that offloads its layers, which is not served; {_WAY_OUT}")
    for layer in cache.layers:
        if type(layer).__name__ not in ("DynamicLayer", "StaticLayer"):
            raise InvalidRequest(
                f"past_key_values is a {name} with layers of {type(layer).__name__}, which cannot hold shared chunks; "
                f"{_WAY_OUT}"
            )
    held = int(cache.get_seq_length())
    if held:
        raise InvalidRequest(
            f"past_key_values holds {held} tokens already; pass the whole prompt and an empty cache (past_key_values."
            "reset() empties a static one): the tokens that are known are found by themselves"
        )
    if isinstance(cache, StaticCache):
        _check_static(cache, batch_size, needed_tokens)


def _check_static(cache: Any, batch_size: int, needed_tokens: int) -> None:
    for layer in cache.layers:
        if layer.is_initialized and layer.keys.shape[0] != batch_size:
            raise InvalidRequest(
                f"past_key_values is a StaticCache for a batch of {layer.keys.shape[0]}, but input_ids has "
                f"{batch_size} rows; pass a new one"
            )
        if layer.max_cache_len < needed_tokens:
            raise InvalidRequest(
                f"past_key_values is a StaticCache for {layer.max_cache_len} tokens, but prompt and new tokens need "
                f"{needed_tokens}; make it with max_cache_len={needed_tokens} or more"
            )


def new_cache(model: PreTrainedModel, implementation: str | None, needed_tokens: int) -> Any:
    """An empty cache: "static", or one that grows for anything else."""
    from transformers import DynamicCache, StaticCache

    config = model.config.get_text_config(decoder=True)
    if implementation == "static":
        return StaticCache(config=config, max_cache_len=needed_tokens)
    return DynamicCache(config=config)
