"""Makes a scheduler's or a worker's side of what vLLM configures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

from kvpool.client.engine_registration import EngineRegistration, GpuRegion
from kvpool.connectors.vllm.agent_choice import AgentChoice, WorkerPlace
from kvpool.connectors.vllm.cache_memory import cache_memory
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
from kvpool.connectors.vllm.link import PoolLink, unreachable
from kvpool.connectors.vllm.scheduler import SchedulerSide
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.worker import WorkerSide
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name


def settings_of(vllm_config: Any) -> VllmSettings:
    """raises: InvalidRequest for an extra config that must be changed."""
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
    return settings


def scheduler_side(
    settings: VllmSettings,
    vllm_config: Any,
    kv_cache_config: Any,
    agents: AgentChoice,
    weight_version: Callable[[], str | None],
) -> tuple[SchedulerSide, Callable[[], object]]:
    """And what closes it. weight_version: None if vLLM has none. raises: GeometryUnsupported, InvalidRequest,
    PartitionRefused."""
    facts = cache_facts(vllm_config, kv_cache_config)
    check_ranks(model_spec(settings, vllm_config, facts, read_weights=False), vllm_config)
    place = WorkerPlace.of(vllm_config.parallel_config, 0, on_gpu=not facts.opaque)
    engine_name = f"vllm-{vllm_config.kv_transfer_config.engine_id}-scheduler"

    def plan() -> EngineRegistration:
        endpoint = agents.choose(place)
        spec = model_spec(settings, vllm_config, facts)
        return EngineRegistration(
            endpoint=endpoint,
            engine_name=engine_name,
            keyspace_name=keyspace_name(settings, spec),
            spec=spec,
            layout=_one_block(spec, facts),
            regions=(),
            match_only=True,
        )

    config = settings.client_config(on_gpu=not facts.opaque)
    link = PoolLink(plan, config)
    link.wait_tried(settings.start_wait_s)
    parallel = vllm_config.parallel_config
    events = vllm_config.kv_events_config
    layer_count = vllm_config.model_config.get_total_num_hidden_layers() + facts.draft_layers
    heads = 1 if vllm_config.model_config.use_mla else vllm_config.model_config.get_total_num_kv_heads()
    side = SchedulerSide(
        settings,
        link,
        block_tokens=facts.block_tokens,
        chunk_bytes=settings.chunk_tokens * facts.row_bytes * heads * layer_count,
        worker_count=parallel.world_size,
        shares_blocks=bool(vllm_config.cache_config.enable_prefix_caching),
        tells_changes=events is not None and bool(events.enable_kv_cache_events),
        volatile_tokens=facts.volatile_tokens,
        weights=WeightsEpoch(weight_version),
    )
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
    facts = cache_facts(vllm_config, kv_cache_config)
    rank = vllm_config.parallel_config.rank
    # The geometry is needed now, before vLLM captures addresses; the weights' digest may come later.
    geometry = model_spec(settings, vllm_config, facts, read_weights=False)
    check_ranks(geometry, vllm_config)
    part = part_of_rank(geometry, vllm_config, rank)
    names = layer_order(kv_caches, kv_cache_config.kv_cache_groups[0], len(part.layers), facts.draft_layers)
    memory = cache_memory(
        [kv_caches[name] for name in names], geometry, part, facts.block_tokens, kv_cache_config.num_blocks
    )

    gpu = next((region.memory.device_uuid for region in memory.regions if isinstance(region, GpuRegion)), "")
    place = WorkerPlace.of(vllm_config.parallel_config, rank, on_gpu=bool(gpu), gpu=gpu)

    if not facts.opaque:
        granted = granted_layout(memory.layout, geometry, part)
        _log.info(
            "kvpool: vLLM's KV cache has layout %s: runs of %d KiB in a block, copied by %s",
            *(granted.name, granted.run_bytes >> 10, granted.way),
        )

    def plan() -> EngineRegistration:
        endpoint = agents.choose(place)
        spec = model_spec(settings, vllm_config, facts)
        return EngineRegistration(
            endpoint=endpoint,
            engine_name=f"vllm-{vllm_config.kv_transfer_config.engine_id}-{rank}",
            keyspace_name=keyspace_name(settings, spec),
            spec=spec,
            layout=memory.layout,
            regions=memory.regions,
            events=memory.work.slots,
            load_only=part.load_only,
        )

    config = settings.client_config(on_gpu=memory.work.slots is not None)
    link = PoolLink(plan, config)
    link.wait_tried(settings.start_wait_s)
    side = WorkerSide(
        settings,
        link,
        memory.work,
        block_tokens=facts.block_tokens,
        chunk_bytes=geometry.head_bytes * len(part.heads) * len(part.layers),
        load_only=part.load_only,
        split=memory.split,
        loads_wait=loads_wait,
        idle_wait=idle_wait,
    )

    def close() -> None:
        link.close()
        memory.close()

    return side, close


class _NoLink:
    """Of a worker that cannot share."""

    pool = None

    def start(self, work: object) -> NoReturn:
        """raises: ServiceUnavailable."""
        raise unreachable()


def idle_worker(settings: VllmSettings, vllm_config: Any) -> WorkerSide:
    """Of a worker that cannot share: whatever it is ordered fails at once."""
    return WorkerSide(
        settings,
        cast(PoolLink, _NoLink()),
        EngineWork(None),
        block_tokens=vllm_config.cache_config.block_size,
        chunk_bytes=0,
        load_only=False,
    )


def layer_numbers(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, int]:
    """Of each layer's name, counted from this rank's first layer."""
    draft_layers = cache_facts(vllm_config, kv_cache_config).draft_layers
    names = layer_order(kv_caches, kv_cache_config.kv_cache_groups[0], len(kv_caches), draft_layers)
    return {name: number for number, name in enumerate(names)}


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
