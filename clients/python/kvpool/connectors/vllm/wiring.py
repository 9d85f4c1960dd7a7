"""Makes a scheduler's or a worker's side of what vLLM configures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from kvpool.client.engine_registration import EngineRegistration, GpuRegion
from kvpool.connectors.vllm.agent_choice import AgentChoice, WorkerPlace
from kvpool.connectors.vllm.cache_memory import CacheMemory, cache_memory
from kvpool.connectors.vllm.engine_facts import WeightsEpoch
from kvpool.connectors.vllm.engine_work import EngineWork
from kvpool.connectors.vllm.granted_layout import granted_layout
from kvpool.connectors.vllm.identity import (
    CacheFacts,
    cache_facts,
    check_ranks,
    keyspace_name,
    layer_order,
    model_spec,
    part_of_rank,
)
from kvpool.connectors.vllm.kv_groups import KvCacheGroup
from kvpool.connectors.vllm.link import PoolLink, unreachable
from kvpool.connectors.vllm.scheduler import SchedulerSide
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.worker import WorkerSide
from kvpool.connectors.vllm.worker_stores import WorkerGroup
from kvpool.core.errors import GeometryUnsupported
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from kvpool.core.partition import RankPart

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_STORES_END_S = 3.0  # at shutdown; vLLM ends a worker's process that takes longer than 4 s


def settings_of(vllm_config: Any, kv_cache_config: Any = None) -> VllmSettings:
    """kv_cache_config: None where vLLM does not know it yet. raises: InvalidRequest for an extra config that must be
    changed."""
    transfer = vllm_config.kv_transfer_config
    settings = VllmSettings.of(transfer.kv_connector_extra_config).limited(
        loads=transfer.is_kv_consumer, stores=transfer.is_kv_producer
    )
    if settings.layerwise and vllm_config.max_concurrent_batches > 1:
        # When a load fails, the next step has been built on it already, and vLLM takes its tokens for good.
        _log.warning(
            "kvpool: layerwise loads need --no-async-scheduling and no pipeline; requests wait for their loads"
        )
        return replace(settings, layerwise=False)
    if settings.layerwise and _fails_whole(kv_cache_config):
        _log.warning("kvpool: layerwise loads are not served with sliding windows; requests wait for their loads")
        return replace(settings, layerwise=False)
    return settings


def _fails_whole(kv_cache_config: Any) -> bool:
    """Whether an engine can go on from the end of a load alone, not from its middle: vLLM keeps no blocks before the
    window of the end, and it cannot take failed blocks of several KV cache groups apart."""
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    return len(groups) > 1 or any(type(group.kv_cache_spec).__name__ == "SlidingWindowSpec" for group in groups)


def scheduler_side(
    settings: VllmSettings,
    vllm_config: Any,
    kv_cache_config: Any,
    agents: AgentChoice,
    weight_version: Callable[[], str | None],
) -> tuple[SchedulerSide, Callable[[], object]]:
    """And what closes it. weight_version: None if vLLM has none. raises: GeometryUnsupported, InvalidRequest,
    PartitionRefused."""
    groups = cache_facts(vllm_config, kv_cache_config)
    on_gpu = not groups[0].opaque
    geometries = [model_spec(settings, vllm_config, facts, read_weights=False) for facts in groups]
    for geometry in geometries:
        check_ranks(geometry, vllm_config)
    place = WorkerPlace.of(vllm_config.parallel_config, 0, on_gpu=on_gpu)
    engine_name = f"vllm-{vllm_config.kv_transfer_config.engine_id}-scheduler"

    def plans() -> list[EngineRegistration]:
        endpoint = agents.choose(place)
        specs = [model_spec(settings, vllm_config, facts) for facts in groups]
        return [
            EngineRegistration(
                endpoint=endpoint,
                engine_name=engine_name,
                keyspace_name=keyspace_name(settings, spec, facts),
                spec=spec,
                layout=_one_block(spec, facts),
                regions=(),
                match_only=True,
            )
            for spec, facts in zip(specs, groups, strict=True)
        ]

    link = PoolLink(plans, settings.client_config(on_gpu=on_gpu))
    link.wait_tried(settings.start_wait_s)
    parallel = vllm_config.parallel_config
    events = vllm_config.kv_events_config
    side = SchedulerSide(
        settings,
        link,
        [
            KvCacheGroup(
                block_tokens=facts.block_tokens,
                chunk_bytes=geometry.head_bytes * geometry.group.kv_heads * geometry.group.layers,
                window_tokens=facts.window_tokens,
            )
            for geometry, facts in zip(geometries, groups, strict=True)
        ],
        worker_count=parallel.world_size,
        shares_blocks=bool(vllm_config.cache_config.enable_prefix_caching),
        tells_changes=events is not None and bool(events.enable_kv_cache_events),
        volatile_tokens=groups[0].volatile_tokens,
        weights=WeightsEpoch(weight_version),
    )
    if side.watches_blocks and getattr(kv_cache_config, "prefix_cache_retention_interval", None) == 0:
        # With its default vLLM uses blocks again first of all that have left a window, often while they are stored.
        # With dense retention they are kept as all others, as long as there is room. It reads this later.
        kv_cache_config.prefix_cache_retention_interval = None
    return side, link.close


def worker_side(
    settings: VllmSettings,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    agents: AgentChoice,
    *,
    loads_wait: bool,
    idle_wait: bool,
) -> tuple[WorkerSide, Callable[[], object]]:
    """And what closes it. loads_wait, idle_wait: see WorkerSide. raises: GeometryUnsupported, InvalidRequest,
    PartitionRefused, StartupFailed."""
    rank = vllm_config.parallel_config.rank
    groups = _rank_groups(settings, vllm_config, kv_cache_config, kv_caches)
    memory, part = groups[0].memory, groups[0].part  # of the memory's device, and of who writes, all say the same
    gpu = next((region.memory.device_uuid for region in memory.regions if isinstance(region, GpuRegion)), "")
    place = WorkerPlace.of(vllm_config.parallel_config, rank, on_gpu=bool(gpu), gpu=gpu)

    if not groups[0].facts.opaque:
        granted = granted_layout(memory.layout, groups[0].geometry, part)
        _log.info(
            "kvpool: vLLM's KV cache has layout %s: runs of %d KiB in a block, copied by %s",
            *(granted.name, granted.run_bytes >> 10, granted.way),
        )

    def plans() -> list[EngineRegistration]:
        endpoint = agents.choose(place)
        specs = [model_spec(settings, vllm_config, group.facts) for group in groups]
        return [
            EngineRegistration(
                endpoint=endpoint,
                engine_name=f"vllm-{vllm_config.kv_transfer_config.engine_id}-{rank}",
                keyspace_name=keyspace_name(settings, spec, group.facts),
                spec=spec,
                layout=group.memory.layout,
                regions=group.memory.regions,
                events=group.memory.work.slots,
                load_only=group.part.load_only,
            )
            for spec, group in zip(specs, groups, strict=True)
        ]

    link = PoolLink(plans, settings.client_config(on_gpu=memory.work.slots is not None))
    link.wait_tried(settings.start_wait_s)
    side = WorkerSide(
        settings,
        link,
        [group.for_worker for group in groups],
        load_only=part.load_only,
        fails_whole=_fails_whole(kv_cache_config),
        loads_wait=loads_wait,
        idle_wait=idle_wait,
    )

    def close() -> None:
        side.finish_stores(_STORES_END_S)
        link.close()
        for group in groups:
            group.memory.close()

    return side, close


@dataclass(frozen=True, slots=True)
class _RankGroup:
    """One KV cache group on one rank."""

    facts: CacheFacts
    geometry: KeyspaceSpec
    part: RankPart
    memory: CacheMemory

    @property
    def for_worker(self) -> WorkerGroup:
        return WorkerGroup(
            block_tokens=self.facts.block_tokens,
            chunk_bytes=self.geometry.head_bytes * len(self.part.heads) * len(self.part.layers),
            work=self.memory.work,
            split=self.memory.split,
        )


def _rank_groups(
    settings: VllmSettings, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> list[_RankGroup]:
    """The geometry is needed now, before vLLM captures addresses; the weights' digest may come later."""
    found: list[_RankGroup] = []
    for facts, tensors, group in _of_groups(vllm_config, kv_cache_config, kv_caches):
        geometry = model_spec(settings, vllm_config, facts, read_weights=False)
        check_ranks(geometry, vllm_config)
        part = part_of_rank(geometry, vllm_config, vllm_config.parallel_config.rank)
        names = layer_order(tensors, group, len(part.layers), facts.draft_layers)
        memory = cache_memory(
            [tensors[name] for name in names], geometry, part, facts.block_tokens, kv_cache_config.num_blocks
        )
        found.append(_RankGroup(facts, geometry, part, memory))
    return found


def _of_groups(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> list[tuple[CacheFacts, Mapping[str, torch.Tensor], Any]]:
    """Of each KV cache group: its facts, its layers' tensors and the group itself."""
    facts, groups = cache_facts(vllm_config, kv_cache_config), kv_cache_config.kv_cache_groups
    if len(groups) == 1:  # layers that share KV are missed there by their count
        return [(facts[0], kv_caches, groups[0])]
    named = {name for group in groups for name in group.layer_names}
    if named != set(kv_caches):
        raise GeometryUnsupported(
            f"the engine has {len(kv_caches)} KV tensors, its KV cache groups name {len(named)} layers: layers that "
            f"share KV are not served"
        )
    return [
        (one, {name: kv_caches[name] for name in group.layer_names}, group)
        for one, group in zip(facts, groups, strict=True)
    ]


class _NoLink:
    """Of a worker that cannot share."""

    pools = ()

    def start(self, work: object) -> NoReturn:
        """raises: ServiceUnavailable."""
        raise unreachable()


def idle_worker(settings: VllmSettings, vllm_config: Any, kv_cache_config: Any) -> WorkerSide:
    """Of a worker that cannot share: whatever it is ordered fails at once."""
    block_tokens = vllm_config.cache_config.block_size
    group = WorkerGroup(block_tokens=block_tokens, chunk_bytes=0, work=EngineWork(None))
    return WorkerSide(
        settings,
        cast(PoolLink, _NoLink()),
        [group] * (len(kv_cache_config.kv_cache_groups) if kv_cache_config is not None else 1),
        load_only=False,
        fails_whole=_fails_whole(kv_cache_config),
    )


def layer_numbers(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, int]:
    """Of each layer's name, counted from this rank's first layer of the KV cache group."""
    return {
        name: number
        for facts, tensors, group in _of_groups(vllm_config, kv_cache_config, kv_caches)
        for number, name in enumerate(layer_order(tensors, group, len(tensors), facts.draft_layers))
    }


def _one_block(spec: KeyspaceSpec, facts: CacheFacts) -> EngineLayout:
    """A cache of one block with all layers and heads of the model: a scheduler has no cache, it only asks."""
    row_bytes, rows = spec.engine_row_bytes, 1 if spec.opaque else facts.block_tokens
    heads, planes = spec.group.kv_heads, spec.planes
    plane_bytes = rows * heads * row_bytes
    layers = tuple(
        LayerLayout(
            tuple(
                RowPlane(
                    handle=0,
                    offset_bytes=(layer * planes + plane) * plane_bytes,
                    block_stride_bytes=plane_bytes,
                    token_stride_bytes=0 if spec.opaque else heads * row_bytes,
                    head_stride_bytes=row_bytes,
                    row_bytes=row_bytes,
                )
                for plane in range(planes)
            )
        )
        for layer in range(spec.group.layers)
    )
    return EngineLayout(
        block_tokens=facts.block_tokens,
        block_count=1,
        layers=layers,
        first_layer=0,
        first_head=0,
        head_count=heads,
        handle_sizes=(plane_bytes * planes * spec.group.layers,),
    )
