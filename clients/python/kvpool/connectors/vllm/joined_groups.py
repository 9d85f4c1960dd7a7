"""Finds out which of vLLM's KV cache groups are one group of the pool."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.connectors.vllm.identity import KvCacheInfo


def join_groups(infos: Sequence[KvCacheInfo], kv_cache_config: Any) -> tuple[KvCacheInfo, ...]:
    """Join groups with windows or recurrent state that differ only in their layers' numbers, if the layers of each lie
    at the same places."""
    places = _places_of_layers(kv_cache_config)
    joined: dict[Any, KvCacheInfo] = {}
    for info in infos:
        names = kv_cache_config.kv_cache_groups[info.members[0]].layer_names
        key: Any = info.members
        if (info.window_tokens or info.state) and all(name in places for name in names):
            key = replace(info, layer_numbers=(), members=()), tuple(places[name] for name in _by_number(names))
        first = joined.get(key)
        joined[key] = (
            info
            if first is None
            else replace(
                first, layer_numbers=first.layer_numbers + info.layer_numbers, members=first.members + info.members
            )
        )
    return tuple(joined.values())


def _by_number(names: Collection[str]) -> list[str]:
    from vllm.model_executor.models.utils import extract_layer_index

    return sorted(names, key=extract_layer_index)


def _places_of_layers(kv_cache_config: Any) -> dict[str, tuple[int, ...]]:
    """Return what says where each layer's blocks are, as far as it is known: equal for layers that lie over each
    other."""
    places: dict[str, tuple[int, ...]] = {}
    for number, tensor in enumerate(getattr(kv_cache_config, "kv_cache_tensors", ())):
        if hasattr(tensor, "layer_stride"):  # all tensors are parts of one allocation
            for at, name in enumerate(tensor.layers):
                places[name] = (tensor.offset + at * tensor.layer_stride, tensor.block_stride)
        elif hasattr(tensor, "shared_by"):  # as vLLM had it before
            places.update((name, (number,)) for name in tensor.shared_by)
    return places
