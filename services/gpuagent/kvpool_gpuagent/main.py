"""The gpuagent process: `python -m kvpool_gpuagent.main --index-endpoints HOST:PORT ...`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
import time
from contextlib import AsyncExitStack

from prometheus_client import CollectorRegistry

import kvpool
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.pagestore import SessionPlan
from kvpool.core.cluster import NodeInfo, NodeKind, NodeLoad
from kvpool.core.errors import KvPoolError, StartupFailed
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.tracing import NO_TRACER, Tracer
from kvpool.v1 import gpuagent_pb2, gpuagent_pb2_grpc
from kvpool_gpuagent.adapters.arena_pool import ArenaLink, ArenaPool
from kvpool_gpuagent.adapters.cpu.device import CpuDevice
from kvpool_gpuagent.adapters.grpc_clients import GrpcIndex, GrpcPeerAgents
from kvpool_gpuagent.adapters.page_streams import PeerClients
from kvpool_gpuagent.adapters.stream_pool import StreamBuffers, StreamPool
from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_gpuagent.engine.agent import GpuAgentEngine
from kvpool_gpuagent.engine.descriptors import FdExchange
from kvpool_gpuagent.identity import announce, gpu_agents_beside
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.ports import Device, PagePool
from kvpool_gpuagent.servicer import GpuAgentServicer
from kvpool_gpuagent.stream import Registrar
from kvpool_server.config import describe
from kvpool_server.data_directory import DataDirectory, boot_id
from kvpool_server.fds import FdServer
from kvpool_server.interceptors import (
    DeadlinePolicy,
    DefaultTenantAuthenticator,
    RequestMetrics,
    aio_interceptors,
    current_identity,
)
from kvpool_server.lifecycle import Stop, clear_ready_file, write_ready_file
from kvpool_server.listen import TcpAddress, parse_address
from kvpool_server.logs import fields
from kvpool_server.metrics import new_registry, open_service_tracer
from kvpool_server.node.chunk_directory import NoLocations
from kvpool_server.node.node_link import NodeLink
from kvpool_server.node.replica_feed import LocationReplica, MatchedBy, ReplicaConfig
from kvpool_server.process import tune_process
from kvpool_server.server import ControlServer
from kvpool_server.service import run_with_settings, serve_metrics
from kvpool_server.tls import ServiceTls, open_tls

_log = logging.getLogger(__name__)

_PROGRESS_LOG_S = 5.0
_SERVICE_NAME = gpuagent_pb2.DESCRIPTOR.services_by_name["GpuAgentService"].full_name


def main() -> int:
    """Run the service; returns the exit code of kvpool_server.lifecycle."""
    return run_with_settings(_serve, GpuAgentConfig, service="gpuagent")


# Each call of the driver lets go of the interpreter. At 0.5 ms, which other services have, a thread then waited for the
# event loop so long that enqueuing 64 MiB took 1.3 to 3 ms instead of 0.3; the link takes 1.2 ms to copy them.
_SWITCH_INTERVAL_S = 0.00005


async def _serve(stop: Stop, config: GpuAgentConfig) -> None:
    tune_process(_SWITCH_INTERVAL_S)
    config = dataclasses.replace(config, host_id=config.host_id or boot_id())
    clear_ready_file(config.ready_file)
    _log.info("starting", extra=fields(version=kvpool.__version__, **describe(config)))
    registry = new_registry()
    async with AsyncExitStack() as stack:
        directory = DataDirectory(config.data_dir, "agent")
        stack.callback(directory.close)
        tracer = open_service_tracer("gpuagent", registry)
        stack.push_async_callback(asyncio.to_thread, tracer.close)
        tls = open_tls(config, registry, service="gpuagent")
        calling = _calling(config, tls, tracer)
        client = IndexClient(calling)
        stack.push_async_callback(client.close)
        engine, arena = _engine(config, calling, client, registry, stack, stop)
        desk = FdExchange()
        descriptor_socket = config.socket.with_name(config.socket.name + ".fds").absolute()
        registrar = Registrar(engine, desk, descriptor_socket)
        page_pool = "arena" if config.pagestore_socket else "remote"
        server = build_server(
            GpuAgentServicer(registrar, directory.node_id, page_pool, lambda: current_identity().tenant),
            config,
            registry,
            tracer,
        )
        server.listen_unix(config.socket, group_access=config.socket_group_access)
        node = _node(config, directory.node_id, server.listen_tcp(parse_address("listen", config.listen), tls))
        if config.health_listen:
            server.listen_health(parse_address("health_listen", config.health_listen))
        descriptors = FdServer(descriptor_socket, on_offer=desk.on_offer, group_access=config.socket_group_access)
        descriptors.start()
        stack.callback(descriptors.close)
        metrics_url, stop_metrics = serve_metrics(config, registry, config.advertise_host)
        stack.callback(stop_metrics)
        node = dataclasses.replace(node, metrics_url=metrics_url)
        # What engines' caches hold is asked of agents on their host: to the index an agent announces no locations.
        link = NodeLink(client, node, load=NodeLoad, truth=NoLocations(), on_superseded=stop.fail)
        stack.push_async_callback(link.close)
        await _measure_link(engine)
        # A GPU's copies need registered memory. The CPU's page tables are filled segment by segment, which is quick.
        if arena is not None and config.device == "cuda":
            preparing = await _prepare(arena, config.prepare_s)
            stack.callback(preparing.cancel)
        await server.start()
        await server.set_serving(True)
        linking = asyncio.ensure_future(link.start())
        uuid = engine.device.uuid
        stack.callback(announce(config.socket, device=config.device, device_uuid=uuid, host_id=config.host_id))
        _publish(config, node)
        await stop.wait()
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)
        # Sessions first: their streams end with the reason, and their slots go back, before the server cuts them off.
        await engine.close()
        await server.stop(config.drain_s)


def _calling(config: GpuAgentConfig, tls: ServiceTls | None, tracer: Tracer) -> ClientConfig:
    """How this agent calls the index, pagestores and other agents."""
    return ClientConfig(
        index_endpoints=config.index_endpoints,
        host_id=config.host_id,
        tls=tls.client if tls else None,
        tracer=tracer,
    )


async def _measure_link(engine: GpuAgentEngine) -> None:
    found = await asyncio.to_thread(engine.device.measure_link)
    for direction, bytes_per_s in found.items():
        engine.metrics.link_bandwidth.labels(direction).set(bytes_per_s)
    engine.link_bytes_per_s = found.get("to_device", found.get("copy", 0.0))


def _device(config: GpuAgentConfig, stop: Stop) -> Device:
    """The device of the configuration. Raises StartupFailed where it cannot be had."""
    if config.device == "cpu":
        return CpuDevice(config.copy_threads)
    try:
        # torch and triton take seconds and hundreds of megabytes: only where there is a GPU.
        from kvpool_gpuagent.adapters.gpu.device import CudaDevice

        loop = asyncio.get_running_loop()

        def on_broken(error: KvPoolError) -> None:
            loop.call_soon_threadsafe(stop.fail, error)

        return CudaDevice(
            ordinal=config.device_ordinal,
            scratch_bytes=config.scratch_bytes,
            peer_programs=config.peer_programs,
            on_broken=on_broken,
        )
    except (ImportError, KvPoolError, RuntimeError, AssertionError) as error:
        raise StartupFailed(
            f"device cuda cannot be served ({error}); install kvpool[gpuagent-cuda] on a machine with an NVIDIA GPU, "
            f"or use --device cpu"
        ) from error


def _engine(
    config: GpuAgentConfig,
    calling: ClientConfig,
    client: IndexClient,
    registry: CollectorRegistry,
    stack: AsyncExitStack,
    stop: Stop,
) -> tuple[GpuAgentEngine, ArenaLink | None]:
    """The engine on its adapters, and its link to the local pagestore; what has threads is closed by the stack.
    calling: how others are called."""
    device = _device(config, stop)
    stack.push_async_callback(device.close)
    arena = _arena(config, calling, device, stack)
    pools = ConfiguredPools(client, calling, arena=arena, bounce_bytes=config.bounce_bytes)
    stack.push_async_callback(asyncio.to_thread, pools.close)
    metrics = AgentMetrics(registry)
    replica = location_replica(client, metrics, replica_bytes=config.replica_bytes)
    index = GrpcIndex(client, config.index_timeout_ms / 1e3, replica)
    stack.push_async_callback(index.close)
    agents = GrpcPeerAgents(calling, lambda: gpu_agents_beside(config.socket))
    stack.push_async_callback(agents.close)
    return GpuAgentEngine(config, device, index, pools, metrics, agents, calling.tracer), arena


def _arena(config: GpuAgentConfig, calling: ClientConfig, device: Device, stack: AsyncExitStack) -> ArenaLink | None:
    if not config.pagestore_socket:
        return None
    plan = SessionPlan(endpoint=f"unix:{config.pagestore_socket}", peer_name=f"agent {config.device}")
    arena = ArenaLink(plan, calling, on_map=device.register_segment)
    stack.push_async_callback(arena.close)
    return arena


async def _prepare(arena: ArenaLink, wait_s: float) -> asyncio.Task[None]:
    """Map and register this agent's share of the arena: until all is ready, or the time is up and the rest follows
    beside what is served. An agent whose pagestore cannot be reached serves without; each segment is mapped later."""
    started_s = time.monotonic()

    async def prepare() -> None:
        try:
            await arena.prepare()
        except KvPoolError as error:
            _log.warning("arena memory is not prepared, it is mapped when it is used: %s", error)
        else:
            took_s = round(time.monotonic() - started_s, 1)
            _log.info("arena memory is ready", extra=fields(mapped_bytes=arena.mapped_bytes, seconds=took_s))

    preparing = asyncio.ensure_future(prepare())
    while not preparing.done() and time.monotonic() - started_s < wait_s:
        left_s = wait_s - (time.monotonic() - started_s)
        await asyncio.wait((preparing,), timeout=min(_PROGRESS_LOG_S, left_s))
        if not preparing.done():
            _log.info("preparing arena memory", extra=fields(mapped_bytes=arena.mapped_bytes))
    if not preparing.done():
        _log.warning("arena memory is not ready after %g s; serving meanwhile", wait_s)
    return preparing


def build_server(
    servicer: GpuAgentServicer, config: GpuAgentConfig, registry: CollectorRegistry, tracer: Tracer = NO_TRACER
) -> ControlServer:
    """The gRPC server with everything that goes around its calls; not listening yet."""
    server = ControlServer(
        interceptors=aio_interceptors(
            metrics=RequestMetrics("gpuagent", registry),
            authenticator=DefaultTenantAuthenticator(config.tenant),
            deadlines=DeadlinePolicy(),
            tracer=tracer,
        ),
        service_names=[_SERVICE_NAME],
    )
    gpuagent_pb2_grpc.add_GpuAgentServiceServicer_to_server(servicer, server.grpc)
    return server


def _node(config: GpuAgentConfig, node_id: bytes, port: int) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        kind=NodeKind.AGENT,
        host_id=config.host_id,
        endpoint=str(TcpAddress(config.advertise_host, port)),
        local_socket=str(config.socket.absolute()),
    )


def _publish(config: GpuAgentConfig, node: NodeInfo) -> None:
    _log.info("serving", extra=fields(endpoint=node.endpoint, socket=node.local_socket, metrics_url=node.metrics_url))
    write_ready_file(
        config.ready_file,
        endpoint=node.endpoint,
        socket=node.local_socket,
        metrics_url=node.metrics_url,
        node_id=node.node_id.hex(),
    )


def location_replica(client: IndexClient, metrics: AgentMetrics, *, replica_bytes: int) -> LocationReplica | None:
    """A replica that counts itself; None for no bytes."""
    if not replica_bytes:
        return None
    counters = {by: metrics.replica_matches.labels(by.value) for by in MatchedBy}
    counted_resyncs = 0

    def on_event(replica: LocationReplica) -> None:
        nonlocal counted_resyncs
        metrics.replica_bytes.set(replica.used_bytes)
        metrics.replica_groups.set(replica.group_count)
        metrics.replica_resyncs.inc(replica.resync_count - counted_resyncs)
        counted_resyncs = replica.resync_count

    return LocationReplica(
        client,
        ReplicaConfig(capacity_bytes=replica_bytes),
        on_match=lambda matched_by: counters[matched_by].inc(),
        on_event=on_event,
    )


class ConfiguredPools:
    """See ports.PoolFactory: the arena of the local pagestore if there is one, else streams through bounce buffers."""

    def __init__(self, index: IndexClient, config: ClientConfig, *, arena: ArenaLink | None, bounce_bytes: int) -> None:
        """arena: the link to this host's pagestore; None: there is none."""
        self._index, self._config, self._arena = index, config, arena
        self._buffers = StreamBuffers.of(bounce_bytes)
        self._peers = PeerClients(config.tls, config.tracer)

    def __call__(self, keyspace: bytes, spec: KeyspaceSpec) -> PagePool:
        """A pool for one engine session."""
        if self._arena is not None:
            return ArenaPool(self._arena, keyspace, spec)
        return StreamPool(keyspace, spec, self._index, self._buffers, self._peers, self._config.host_id)

    def close(self) -> None:
        """End connections; blocks until their threads have ended."""
        self._peers.close()


if __name__ == "__main__":
    sys.exit(main())
