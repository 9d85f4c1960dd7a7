"""Which of transformers' caches can begin with shared chunks, and the cache for one call of `generate`.

Layers with a sliding window get a cache of all tokens, too: the model masks what is outside of the window, and chunks
that have left it could not be stored from a cache that drops them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool.core.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

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
        if getattr(layer, "is_sliding", False):
            raise InvalidRequest(
                f"past_key_values is a {name} with layers of {type(layer).__name__}, which drop what has left their "
                "window; leave past_key_values out, or pass DynamicCache() without the model's config"
            )
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
    """An empty cache: "static", or one that grows for anything else. raises: InvalidRequest for a static one of a model
    with sliding windows."""
    from transformers import StaticCache

    if implementation != "static":
        return growing_cache(model)
    cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=needed_tokens)
    if any(layer.is_sliding for layer in cache.layers):
        raise InvalidRequest(
            "cache_implementation='static' drops what has left the model's sliding windows; leave it out"
        )
    return cache


def growing_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty cache whose layers keep all tokens."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [DynamicLayer() if layer.is_sliding else layer for layer in cache.layers]
    return cache
