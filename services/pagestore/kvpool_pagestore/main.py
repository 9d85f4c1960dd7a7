"""The pagestore process: `python -m kvpool_pagestore.main --data-dir DIR --index-endpoints HOST:PORT ...`."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import sys
from contextlib import AsyncExitStack
from dataclasses import replace

from prometheus_client import CollectorRegistry

import kvpool
from kvpool.core.clock import SystemClock
from kvpool.core.cluster import NodeInfo
from kvpool.core.errors import StartupFailed, StoreFault
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool_pagestore.adapters.arena import MemfdArena
from kvpool_pagestore.adapters.index_link import NodeIndexLink, NoIndex, Registrant
from kvpool_pagestore.adapters.page_store import largest_batch_bytes, live_page_bytes, open_disk_tier
from kvpool_pagestore.adapters.peer import GrpcPeerPages
from kvpool_pagestore.config import PageStoreConfig
from kvpool_pagestore.engine.parts import EngineParts, EngineWorkers
from kvpool_pagestore.engine.pulls import QUIET_STREAMS_MAX
from kvpool_pagestore.engine.store import PageStoreEngine
from kvpool_pagestore.main_servers import PageStoreServers
from kvpool_pagestore.metrics import PageStoreMetrics
from kvpool_pagestore.ports import IndexLink, NoPlacement, PageStore
from kvpool_server.config import describe
from kvpool_server.data_directory import DataDirectory
from kvpool_server.interceptors import RequestMetrics
from kvpool_server.lifecycle import Stop, clear_ready_file, write_ready_file
from kvpool_server.logs import fields
from kvpool_server.metrics import new_registry, open_service_tracer
from kvpool_server.process import mapping_large_buffers, release_free_memory, tune_process
from kvpool_server.service import run_with_settings, serve_metrics
from kvpool_server.tasks import BoundedExecutor
from kvpool_server.tls import ServiceTls, open_tls

_log = logging.getLogger(__name__)

_NICENESS = 10  # of threads whose work no request waits for: an engine beside us comes first


def main() -> int:
    """Run the service; returns the exit code of kvpool_server.lifecycle."""

    async def serve(stop: Stop, config: PageStoreConfig) -> None:
        async with AsyncExitStack() as stack:
            await _serve(stop, config, stack)

    return run_with_settings(serve, PageStoreConfig, service="pagestore")


async def _serve(stop: Stop, config: PageStoreConfig, stack: AsyncExitStack) -> None:
    """What is opened is closed by `stack`, the last first, however the start or the run ends."""
    tune_process()
    _log.info("starting", extra=fields(version=kvpool.__version__, **describe(config)))
    registry = new_registry()
    tls = open_tls(config, registry, service="pagestore")
    directory = DataDirectory(config.data_dir, "pagestore")
    stack.callback(directory.close)
    clear_ready_file(config.ready_file)  # not before: it may be that of the process that holds the directory
    arena = _Arena(config, directory.node_id)
    stack.callback(arena.close)
    tracer = _tracer(registry, stack)
    index = _index(config, tls, tracer)
    parts = EngineParts(
        arena=arena.segments,
        store=await _open_store(config),
        disk_live_bytes=live_page_bytes(config.disk_bytes),
        peers=GrpcPeerPages(tls=tls.client if tls else None, tracer=tracer),
        index=index,
        placement=index if isinstance(index, NodeIndexLink) else NoPlacement(),
        workers=_workers(config, stack),
        clock=SystemClock(),
        first_segment_id=(secrets.randbits(40) << 16) + 1,  # never an id that an earlier process gave to a peer
        tracer=tracer,
    )
    metrics = PageStoreMetrics(registry)
    engine = PageStoreEngine(_with_fitting_batches(config), parts, metrics)
    stack.push_async_callback(engine.close)
    stack.callback(parts.peers.close)
    last_incarnation = await _load_engine(engine, arena.segments)
    servers = PageStoreServers(config, engine, directory.node_id, RequestMetrics("pagestore", registry), tls, tracer)
    metrics_url, stop_metrics = serve_metrics(config, registry, config.advertise_host)
    stack.callback(stop_metrics)
    node = servers.listen(metrics_url)
    node = replace(node, draining=engine.drain.refuses_pages)
    await adopt_incarnation(config, parts, engine, node, last_incarnation, stop)
    loop = asyncio.get_running_loop()
    metrics.watch(lambda: engine.read_gauges(loop))
    if isinstance(index, NodeIndexLink):
        metrics.watch_reconciliation(index.reconciler)
    await servers.start()
    engine.replication.start()
    engine.drain.start()
    if config.arena_prepare:
        engine.preparation.start()
    gc.freeze()  # what was made at start stays: a collection that walks over it takes 60 ms
    await asyncio.to_thread(release_free_memory)
    _publish(config, node, engine.incarnation)
    try:
        await stop.wait()
    finally:
        await servers.control.set_serving(False)
        arena.unused = await engine.stop(config.drain_ms / 1e3)
        await parts.index.close()
        await asyncio.to_thread(parts.peers.close)
        await servers.stop()


class _Arena:
    """The arena and whether its segments may be removed in the end."""

    def __init__(self, config: PageStoreConfig, node_id: bytes) -> None:
        self.unused = False
        self.segments = MemfdArena(config.session_dir / f"kvpool-{node_id.hex()}")
        self.segments.open(config.arena_bytes)

    def close(self) -> None:
        self.segments.close(remove=self.unused)


def _tracer(registry: CollectorRegistry, stack: AsyncExitStack) -> Tracer:
    tracer = open_service_tracer("pagestore", registry)
    stack.push_async_callback(asyncio.to_thread, tracer.close)
    return tracer


def _with_fitting_batches(config: PageStoreConfig) -> PageStoreConfig:
    largest_bytes = largest_batch_bytes(config.disk_bytes, config.write_threads)
    return replace(config, batch_bytes=min(config.batch_bytes, largest_bytes))


async def _open_store(config: PageStoreConfig) -> PageStore | None:
    if not config.disk_bytes:
        _log.warning("disk_bytes is 0: no disk tier, pages end with this process")
        return None
    with mapping_large_buffers():
        return await asyncio.to_thread(open_disk_tier, config.data_dir / "disk", config.disk_bytes)


def _index(config: PageStoreConfig, tls: ServiceTls | None, tracer: Tracer = NO_TRACER) -> IndexLink:
    if not config.index_endpoints:
        return NoIndex()
    return NodeIndexLink(
        config.index_endpoints,
        config.index_timeout_ms / 1e3,
        config.reconcile_interval_ms / 1e3,
        tls=tls.client if tls else None,
        tracer=tracer,
    )


def _workers(config: PageStoreConfig, stack: AsyncExitStack) -> EngineWorkers:
    def executor(name: str, threads: int, *, niceness: int = 0) -> BoundedExecutor:
        made = BoundedExecutor(name, threads=threads, queue_limit=config.queue_limit, niceness=niceness)
        stack.push_async_callback(made.close)
        return made

    return EngineWorkers(
        verify=executor("verify", config.verify_threads),
        read=executor("read", config.read_threads),
        write=executor("write", config.write_threads, niceness=_NICENESS),
        seal=executor("seal", config.seal_threads, niceness=_NICENESS),
        pull=executor("pull", config.pull_threads + QUIET_STREAMS_MAX),
        push=executor("push", config.push_threads),
        prepare=executor("prepare", min(config.prepare_threads, os.cpu_count() or 1), niceness=_NICENESS),
    )


async def _load_engine(engine: PageStoreEngine, arena: MemfdArena) -> int:
    try:
        with mapping_large_buffers():
            return await engine.load(arena.old_sessions())
    except StoreFault as error:
        raise StartupFailed(f"the disk tier cannot be read: {error}") from error


async def adopt_incarnation(
    config: PageStoreConfig,
    parts: EngineParts,
    engine: PageStoreEngine,
    node: NodeInfo,
    last_incarnation: int,
    stop: Stop,
) -> None:
    """Register, and serve under what the index grants; without an answer, under what is higher than all before."""
    incarnation = 0
    if isinstance(parts.index, NodeIndexLink):
        registrant = Registrant(
            node=node,
            last_incarnation=last_incarnation,
            load=engine.load_figures,
            truth=engine.inventory,
            on_superseded=stop.fail,
            on_policy_version=engine.policies.version_seen,
            adopt=engine.adopt_incarnation,
        )
        incarnation = await parts.index.register(registrant, config.index_start_wait_ms / 1e3)
    # Readers elsewhere learn incarnations from the index alone, so a local one that the index never saw fences nothing
    # it should not; it is on disk before it is published, and what the index grants later is higher.
    if not incarnation:
        await engine.adopt_incarnation(max(last_incarnation, parts.clock.wall_us()) + 1)


def _publish(config: PageStoreConfig, node: NodeInfo, incarnation: int) -> None:
    shown: dict[str, str | int] = {
        "endpoint": node.endpoint,
        "socket": node.local_socket,
        "bulk_endpoint": node.bulk_endpoint,
        "metrics_url": node.metrics_url,
        "node_id": node.node_id.hex(),
        "incarnation": incarnation,
    }
    _log.info("serving", extra=fields(**shown))
    write_ready_file(config.ready_file, **shown)


if __name__ == "__main__":
    sys.exit(main())
