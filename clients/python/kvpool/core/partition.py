"""Which layers and heads of a model one engine rank has, and which of the ranks that have the same writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.core.errors import InvalidRequest, PartitionRefused
from kvpool.core.geometry import KvGroup, check_count


@dataclass(frozen=True, slots=True)
class RankPart:
    """A rank's part of the model's KV.

    load_only: another rank has the same bytes and writes them; this one only loads.
    """

    layers: range
    heads: range
    load_only: bool


def rank_part(
    group: KvGroup,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    pp_rank: int = 0,
    pp_layers: Sequence[int] | None = None,
) -> RankPart:
    """The part of one rank of an engine that splits heads over TP ranks and layers over PP stages.

    tp_size:   up to the KV heads, each rank has an equal share of them. Beyond, each head is on tp_size / heads
               consecutive ranks, the first of which writes. MLA has one head: TP rank 0 writes, all load.
    pp_layers: layers of each stage, in order; None = one stage.
    raises: InvalidRequest naming the argument; PartitionRefused if neither of heads and TP ranks divides the other.
    """
    check_count("tp_size", tp_size)
    check_count("tp_rank", tp_rank, lowest=0, highest=tp_size - 1)
    stages = [group.layers] if pp_layers is None else list(pp_layers)
    for number, count in enumerate(stages):
        check_count(f"pp_layers[{number}]", count)
    if sum(stages) != group.layers:
        raise InvalidRequest(f"pp_layers must add up to the model's {group.layers} layers, got {sum(stages)}")
    check_count("pp_rank", pp_rank, lowest=0, highest=len(stages) - 1)
    if group.kv_heads % tp_size and tp_size % group.kv_heads:
        raise PartitionRefused(f"{group.kv_heads} KV heads cannot be split over {tp_size} TP ranks")
    heads_here = max(1, group.kv_heads // tp_size)
    ranks_per_head = max(1, tp_size // group.kv_heads)
    first_head = tp_rank // ranks_per_head * heads_here
    first_layer = sum(stages[:pp_rank])
    return RankPart(
        layers=range(first_layer, first_layer + stages[pp_rank]),
        heads=range(first_head, first_head + heads_here),
        load_only=tp_rank % ranks_per_head != 0,
    )
