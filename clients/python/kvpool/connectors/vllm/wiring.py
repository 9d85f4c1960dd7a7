"""Builds the connector's scheduler and worker sides from vLLM's configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn, cast

from kvpool.client.block_generations import BlockGenerations
from kvpool.client.engine_registration import EngineRegistration, GpuRegion
from kvpool.connectors.vllm.agent_connection import AgentConnection, unreachable
from kvpool.connectors.vllm.agent_selector import AgentSelector, WorkerPlacement
from kvpool.connectors.vllm.cache_memory import CacheMemory, cache_memory
from kvpool.connectors.vllm.engine_introspection import WeightsEpoch, zeroes_new_blocks
from kvpool.connectors.vllm.identity import (
    KvCacheInfo,
    check_ranks,
    keyspace_name,
    kv_cache_infos,
    layer_order,
    model_spec,
    on_gpu,
    part_of_rank,
    recurrent_block_tokens,
)
from kvpool.connectors.vllm.kv_groups import KvCache, KvCacheGroup
from kvpool.connectors.vllm.scheduler import ConnectorScheduler
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_events import StepEvents
from kvpool.connectors.vllm.worker import ConnectorWorker
from kvpool.connectors.vllm.worker_stores import WorkerKvCache, WorkerKvCacheGroup
from kvpool.core.errors import GeometryUnsupported
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, LayerLayout, RowPlane
from kvpool.core.partition import RankPart

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_COPY_ENGINE_BYTES = 32 << 10  # runs of 32 KiB reach 53 of 55 GB/s on an H200, of 16 KiB 34
_STORES_END_S = 3.0  # at shutdown; vLLM ends a worker's process that takes longer than 4 s


def settings_from_config(vllm_config: Any, kv_cache_config: Any = None) -> VllmSettings:
    """Return the settings. kv_cache_config: None where vLLM does not know it yet.

    raises: InvalidRequest for an invalid extra config.
    """
    transfer = vllm_config.kv_transfer_config
    settings = VllmSettings.of(transfer.kv_connector_extra_config).limited(
        loads=transfer.is_kv_consumer, stores=transfer.is_kv_producer
    )
    checkpoint_tokens = recurrent_block_tokens(kv_cache_config)
    if checkpoint_tokens.bit_count() == 1 and "chunk_tokens" not in transfer.kv_connector_extra_config:
        settings = replace(settings, chunk_tokens=max(16, checkpoint_tokens))
    if settings.layerwise and vllm_config.max_concurrent_batches > 1:
        # When a load fails, the next step has been built on it already, and vLLM takes its tokens for good.
        _log.warning(
            "kvpool: layerwise loads need --no-async-scheduling and no pipeline; requests wait for their loads"
        )
        return replace(settings, layerwise=False)
    if settings.layerwise and _all_or_nothing(kv_cache_config):
        _log.warning(
            "kvpool: layerwise loads are not served with sliding windows or recurrent state; requests wait for their "
            "loads"
        )
        return replace(settings, layerwise=False)
    return settings


def _all_or_nothing(kv_cache_config: Any) -> bool:
    """Whether the engine can resume only from the end of a load, not from its middle.

    vLLM keeps no blocks before the window of the end and no recurrent state in between, and it cannot map failed blocks
    to requests if there are several KV cache groups.
    """
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    kinds = {type(group.kv_cache_spec).__name__ for group in groups}
    return len(groups) > 1 or not kinds.isdisjoint(("SlidingWindowSpec", "MambaSpec"))


def connector_scheduler(
    settings: VllmSettings,
    vllm_config: Any,
    kv_cache_config: Any,
    agents: AgentSelector,
    weight_version: Callable[[], str | None],
) -> tuple[ConnectorScheduler, Callable[[], object]]:
    """Return the scheduler side and a function that closes it. weight_version: returns None if vLLM has none.

    raises: GeometryUnsupported, InvalidRequest, PartitionRefused.
    """
    groups = kv_cache_infos(vllm_config, kv_cache_config)
    device_is_gpu = on_gpu(vllm_config)
    geometries = [model_spec(settings, vllm_config, info, read_weights=False) for info in groups]
    for geometry in geometries:
        check_ranks(geometry, vllm_config)
    place = WorkerPlacement.of(vllm_config.parallel_config, 0, on_gpu=device_is_gpu)
    engine_name = f"vllm-{vllm_config.kv_transfer_config.engine_id}-scheduler"

    def registrations() -> list[EngineRegistration]:
        endpoint = agents.select(place)
        specs = [model_spec(settings, vllm_config, info) for info in groups]
        names = agents.keyspaces = _keyspaces(settings, specs, groups)
        return [
            EngineRegistration(
                endpoint=endpoint,
                engine_name=engine_name,
                keyspace_name=name,
                spec=spec,
                layout=_one_block(spec, info),
                regions=(),
                match_only=True,
                engine_id=_engine_id(vllm_config),
            )
            for name, spec, info in zip(names, specs, groups, strict=True)
        ]

    connection = AgentConnection(registrations, settings.client_config(on_gpu=device_is_gpu))
    connection.wait_first_attempt(settings.start_wait_s)
    parallel = vllm_config.parallel_config
    events = vllm_config.kv_events_config
    side = ConnectorScheduler(
        settings,
        connection,
        KvCache(
            groups=[
                KvCacheGroup(
                    block_tokens=info.block_tokens,
                    chunk_bytes=len(info.members)
                    * (geometry.head_bytes * geometry.group.kv_heads * geometry.group.layers),
                    window_tokens=info.window_tokens,
                    recurrent=bool(info.state),
                    members=info.members,
                )
                for geometry, info in zip(geometries, groups, strict=True)
            ],
            prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
            shared_from_gpu=_shares_gpu_cache(settings, kv_cache_config, groups),
            volatile_tokens=groups[0].volatile_tokens,
        ),
        worker_count=parallel.world_size,
        publishes_events=events is not None and bool(events.enable_kv_cache_events),
        weights=WeightsEpoch(weight_version),
    )
    if (
        any(info.window_tokens or info.state for info in groups)
        and getattr(kv_cache_config, "prefix_cache_retention_interval", None) == 0
    ):
        # With its default vLLM uses blocks again first of all that have left a window, often while they are stored, and
        # names only the last checkpoint of recurrent state. With dense retention they are kept as all others, as long
        # as there is room. It reads this later.
        kv_cache_config.prefix_cache_retention_interval = None
    return side, connection.close


def connector_worker(
    settings: VllmSettings,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    agents: AgentSelector,
    *,
    loads_wait_for_gpu: bool,
    wait_when_idle: bool,
) -> tuple[ConnectorWorker, Callable[[], object]]:
    """Return the worker side and a function that closes it. loads_wait_for_gpu, wait_when_idle: see ConnectorWorker.

    raises: GeometryUnsupported, InvalidRequest, PartitionRefused, StartupFailed.
    """
    rank = vllm_config.parallel_config.rank
    groups = _rank_groups(settings, vllm_config, kv_cache_config, kv_caches)
    memory, part = groups[0].memory, groups[0].part  # of the memory's device, and of who writes, all say the same
    gpu = next((region.memory.device_uuid for region in memory.regions if isinstance(region, GpuRegion)), "")
    place = WorkerPlacement.of(vllm_config.parallel_config, rank, on_gpu=bool(gpu), gpu=gpu)

    shares = _shares_gpu_cache(settings, kv_cache_config, [group.info for group in groups]) and bool(gpu)
    generations = BlockGenerations(memory.layout) if shares else None

    rows = next((group for group in groups if not group.info.opaque), None)
    if rows is not None:
        detected = detect_layout(rows.memory.layout, rows.geometry, rows.part)
        _log.info(
            "kvpool: vLLM's KV cache has layout %s: runs of %d KiB in a block, copied by %s",
            *(detected.name, detected.run_bytes >> 10, detected.copy_path),
        )

    def registrations() -> list[EngineRegistration]:
        endpoint = agents.select(place)
        specs = [model_spec(settings, vllm_config, group.info) for group in groups]
        names = agents.keyspaces = _keyspaces(settings, specs, [group.info for group in groups])
        return [
            EngineRegistration(
                endpoint=endpoint,
                engine_name=f"vllm-{vllm_config.kv_transfer_config.engine_id}-{rank}",
                keyspace_name=name,
                spec=spec,
                layout=group.memory.layout,
                regions=group.memory.regions,
                events=group.memory.step_events.slots,
                load_only=group.part.load_only,
                generations=generations,
                engine_id=_engine_id(vllm_config),
            )
            for name, spec, group in zip(names, specs, groups, strict=True)
        ]

    connection = AgentConnection(registrations, settings.client_config(on_gpu=memory.step_events.slots is not None))
    connection.wait_first_attempt(settings.start_wait_s)
    side = ConnectorWorker(
        settings,
        connection,
        WorkerKvCache(
            groups=[group.for_worker for group in groups],
            load_only=part.load_only,
            all_or_nothing=_all_or_nothing(kv_cache_config),
            generations=generations,
        ),
        loads_wait_for_gpu=loads_wait_for_gpu,
        wait_when_idle=wait_when_idle,
    )

    def close() -> None:
        side.finish_stores(_STORES_END_S)
        connection.close()
        for group in groups:
            group.memory.close()
        if generations is not None:
            generations.close()

    return side, close


def _keyspaces(settings: VllmSettings, specs: Sequence[KeyspaceSpec], groups: Sequence[KvCacheInfo]) -> tuple[str, ...]:
    return tuple(keyspace_name(settings, spec, info) for spec, info in zip(specs, groups, strict=True))


def _shares_gpu_cache(settings: VllmSettings, kv_cache_config: Any, groups: Sequence[KvCacheInfo]) -> bool:
    """Whether other engines of the host may copy from the engine's GPU cache.

    With several KV cache groups vLLM may write to blocks before it reports that a request has them. Where it zeroes new
    blocks, its model runner V2 does so before the worker hears of the step and can raise their generations.
    """
    whole = len(groups) == 1 and not groups[0].opaque and not groups[0].window_tokens
    return settings.share_gpu_cache and whole and not zeroes_new_blocks(kv_cache_config)


def _engine_id(vllm_config: Any) -> bytes:
    """Return an id that scheduler and workers of one engine share; data parallel ranks have different ones."""
    return str(vllm_config.kv_transfer_config.engine_id).encode()[-128:]


@dataclass(frozen=True, slots=True)
class _RankGroup:
    """A KV cache group on one rank."""

    info: KvCacheInfo
    geometry: KeyspaceSpec
    part: RankPart
    memory: CacheMemory

    @property
    def for_worker(self) -> WorkerKvCacheGroup:
        return WorkerKvCacheGroup(
            block_tokens=self.info.block_tokens,
            page_bytes=self.geometry.head_bytes * len(self.part.heads) * len(self.part.layers),
            step_events=self.memory.step_events,
            split=self.memory.split,
        )


def _rank_groups(
    settings: VllmSettings, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> list[_RankGroup]:
    """Read the geometry now, before vLLM captures addresses; the digest of the weights may come later."""
    found: list[_RankGroup] = []
    groups = kv_cache_config.kv_cache_groups
    for info, tensors in _of_groups(vllm_config, kv_cache_config, kv_caches):
        geometry = model_spec(settings, vllm_config, info, read_weights=False)
        check_ranks(geometry, vllm_config)
        part = part_of_rank(geometry, vllm_config, vllm_config.parallel_config.rank)
        layers, *others = [
            [named[name] for name in layer_order(named, groups[number], len(part.layers), info.draft_layers)]
            for number, named in zip(info.members, tensors, strict=True)
        ]
        if any([_place(tensor) for tensor in other] != [_place(tensor) for tensor in layers] for other in others):
            raise GeometryUnsupported(f"equal KV cache groups {info.members} do not lie over each other")
        memory = cache_memory(layers, geometry, part, info.block_tokens, kv_cache_config.num_blocks)
        found.append(_RankGroup(info, geometry, part, memory))
    return found


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _of_groups(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> list[tuple[KvCacheInfo, list[Mapping[str, torch.Tensor]]]]:
    """Return the info of each KV cache group and, for each of its members, its layers' tensors."""
    infos, groups = kv_cache_infos(vllm_config, kv_cache_config), kv_cache_config.kv_cache_groups
    if len(groups) == 1:  # layers that share KV are missed there by their count
        return [(infos[0], [kv_caches])]
    named = {name for group in groups for name in group.layer_names}
    if named != set(kv_caches):
        raise GeometryUnsupported(
            f"the engine has {len(kv_caches)} KV tensors, its KV cache groups name {len(named)} layers: layers that "
            f"share KV are not served"
        )
    return [
        (info, [{name: kv_caches[name] for name in groups[number].layer_names} for number in info.members])
        for info in infos
    ]


class _NoConnection:
    """Connection of a worker that cannot share."""

    pools = ()

    def start(self, work: object) -> NoReturn:
        """raises: ServiceUnavailable."""
        raise unreachable()


def failing_worker(settings: VllmSettings, vllm_config: Any, kv_cache_config: Any) -> ConnectorWorker:
    """Return the worker side of a rank that cannot share: all its jobs fail at once."""
    block_tokens = vllm_config.cache_config.block_size
    group = WorkerKvCacheGroup(block_tokens=block_tokens, page_bytes=0, step_events=StepEvents(None))
    return ConnectorWorker(
        settings,
        cast(AgentConnection, _NoConnection()),
        WorkerKvCache(
            groups=[group] * (len(kv_cache_config.kv_cache_groups) if kv_cache_config is not None else 1),
            all_or_nothing=_all_or_nothing(kv_cache_config),
        ),
    )


def layer_numbers(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of each layer by name, counted from this rank's first layer of its KV cache group."""
    groups = kv_cache_config.kv_cache_groups
    return {
        name: number
        for info, tensors in _of_groups(vllm_config, kv_cache_config, kv_caches)
        for group, named in zip(info.members, tensors, strict=True)
        for number, name in enumerate(layer_order(named, groups[group], len(named), info.draft_layers))
    }


def _one_block(spec: KeyspaceSpec, info: KvCacheInfo) -> EngineLayout:
    """Return the layout of a one-block cache with all layers and heads: a scheduler has no cache and only makes
    lookups."""
    row_bytes, rows = spec.engine_row_bytes, 1 if spec.opaque else info.block_tokens
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
        block_tokens=info.block_tokens,
        block_count=1,
        layers=layers,
        first_layer=0,
        first_head=0,
        head_count=heads,
        handle_sizes=(plane_bytes * planes * spec.group.layers,),
    )


@dataclass(frozen=True, slots=True)
class DetectedLayout:
    """name: vLLM's name, dimensions from the outermost. run_bytes: contiguous bytes, in a block as in the page, of a
    page with all heads of a rank."""

    name: str
    run_bytes: int

    @property
    def copy_path(self) -> str:
        """What copies pages of engines with the same TP degree."""
        return "the copy engine" if self.run_bytes >= _COPY_ENGINE_BYTES else "kernels"


def detect_layout(layout: EngineLayout, spec: KeyspaceSpec, part: RankPart) -> DetectedLayout:
    """Detect which layout vLLM granted, which may be another than the requested one, from a rank's split tensors."""
    planes = [layer.planes[0] for layer in layout.layers]
    first = planes[0]
    apart = len({plane.handle for plane in planes}) > 1
    layer_stride = planes[1].offset_bytes - first.offset_bytes if len(planes) > 1 and not apart else inf
    strides = {
        "L": abs(layer_stride),
        "B": first.block_stride_bytes,
        "H": first.head_stride_bytes,
        "N": first.token_stride_bytes,
    }
    name = "".join(sorted(strides, key=lambda dimension: -strides[dimension])) + "C"
    # A page has, from the innermost: K and V of a token, tokens, heads, layers. A run ends where the block differs.
    grid, run_bytes = ShardGrid.of(spec), spec.planes * first.row_bytes
    layers = min(len(grid.layers_of_group(0)), len(part.layers))
    for dimension, extent in (("N", layout.block_tokens), ("H", layout.head_count), ("L", layers)):
        if extent > 1 and strides[dimension] != run_bytes:
            break
        run_bytes *= extent
    return DetectedLayout(name, run_bytes)
