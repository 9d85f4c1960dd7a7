"""The gpuagent process: `python -m kvpool_gpuagent.main --index-endpoints HOST:PORT ...`."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
from pathlib import Path

import kvpool
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.client.node_link import NodeLink
from kvpool.core.clock import SystemClock
from kvpool.core.cluster import NodeInfo, NodeKind, NodeLoad
from kvpool.core.errors import StartupFailed
from kvpool.v1 import gpuagent_pb2, gpuagent_pb2_grpc
from kvpool_gpuagent.adapters.cpu_device import CpuDevice
from kvpool_gpuagent.adapters.index_client import GrpcIndex
from kvpool_gpuagent.adapters.pools import ConfiguredPools
from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_gpuagent.descriptors import DescriptorDesk
from kvpool_gpuagent.engine import GpuAgentEngine
from kvpool_gpuagent.identity import DataDirectory, host_identity
from kvpool_gpuagent.metrics import AgentMetrics
from kvpool_gpuagent.servicer import GpuAgentServicer
from kvpool_gpuagent.workers import Workers
from kvpool_server.config import describe, load_config
from kvpool_server.fds import FdServer
from kvpool_server.interceptors import DeadlinePolicy, DefaultTenantAuthenticator, RequestMetrics, aio_interceptors
from kvpool_server.lifecycle import Stop, run_service
from kvpool_server.listen import TcpAddress
from kvpool_server.logs import LogFormat, LogLevel, configure_logs, fields
from kvpool_server.metrics import new_registry, start_metrics_server
from kvpool_server.process import die_with_parent, tune_process
from kvpool_server.ready import clear_ready_file, write_ready_file
from kvpool_server.server import ControlServer

_log = logging.getLogger(__name__)

_SERVICE_NAME = gpuagent_pb2.DESCRIPTOR.services_by_name["GpuAgentService"].full_name


def main() -> int:
    """Run the service; returns the exit code of kvpool_server.lifecycle."""

    async def serve(stop: Stop) -> None:
        await _serve(stop, _load())

    return run_service(serve, service="gpuagent", grace_s=60.0)


def _load() -> GpuAgentConfig:
    config = load_config(
        GpuAgentConfig, prog="kvpool-gpuagent", env_prefix="KVPOOL_GPUAGENT", argv=sys.argv[1:], env=os.environ
    )
    configure_logs(service="gpuagent", level=LogLevel(config.log_level), log_format=LogFormat(config.log_format))
    if config.parent_pid:
        die_with_parent(config.parent_pid)
    return dataclasses.replace(config, host_id=host_identity(config.host_id))


async def _serve(stop: Stop, config: GpuAgentConfig) -> None:
    tune_process()
    clear_ready_file(config.ready_file)
    _log.info("starting", extra=fields(version=kvpool.__version__, **describe(config)))
    directory = DataDirectory(config.data_dir)
    clock, registry = SystemClock(), new_registry()
    workers = Workers(config.copy_threads)
    client_config = ClientConfig(index_endpoints=config.index_endpoints, host_id=config.host_id)
    client = IndexClient(client_config)
    pools = ConfiguredPools(
        client, client_config, pagestore_socket=config.pagestore_socket, bounce_bytes=config.bounce_bytes
    )
    engine = GpuAgentEngine(
        config,
        clock,
        CpuDevice(),
        GrpcIndex(client, config.index_timeout_ms / 1e3),
        pools,
        workers,
        AgentMetrics(registry),
    )
    desk = DescriptorDesk()
    descriptor_socket = config.socket.with_name(config.socket.name + ".fds").absolute()
    server = ControlServer(
        interceptors=aio_interceptors(
            metrics=RequestMetrics("gpuagent", registry),
            authenticator=DefaultTenantAuthenticator(config.tenant),
            deadlines=DeadlinePolicy(),
        ),
        service_names=[_SERVICE_NAME],
    )
    page_pool = "arena" if config.pagestore_socket else "remote"
    servicer = GpuAgentServicer(engine, directory.node_id, page_pool, desk, descriptor_socket)
    gpuagent_pb2_grpc.add_GpuAgentServiceServicer_to_server(servicer, server.grpc)
    listen, metrics_listen = _address("listen", config.listen), _address("metrics_listen", config.metrics_listen)
    server.listen_unix(config.socket)
    port = server.listen_tcp(listen)
    descriptors = FdServer(descriptor_socket, on_offer=desk.on_offer)
    descriptors.start()
    metrics_port, stop_metrics = start_metrics_server(metrics_listen.host, metrics_listen.port, registry)
    node = NodeInfo(
        node_id=directory.node_id,
        kind=NodeKind.AGENT,
        host_id=config.host_id,
        endpoint=str(TcpAddress(config.advertise_host, port)),
        local_socket=str(config.socket.absolute()),
        metrics_url=f"http://{TcpAddress(metrics_listen.host, metrics_port)}/metrics",
    )
    # An agent announces nothing yet: gpu locations come with the CUDA device. It registers so that it can be seen.
    link = NodeLink(client, node, load=NodeLoad, snapshot=lambda: iter(()), on_superseded=stop.fail)
    try:
        await server.start()
        await server.set_serving(True)
        linking = asyncio.ensure_future(link.start())
        _publish(config.ready_file, node)
        await stop.wait()
        linking.cancel()
        await engine.close()
        await server.stop(config.drain_s)
    finally:
        await link.close()
        await client.close()
        descriptors.close()
        stop_metrics()
        await asyncio.to_thread(workers.close)
        await asyncio.to_thread(pools.close)
        directory.close()


def _publish(ready_file: Path | None, node: NodeInfo) -> None:
    _log.info("serving", extra=fields(endpoint=node.endpoint, socket=node.local_socket, metrics_url=node.metrics_url))
    write_ready_file(
        ready_file,
        endpoint=node.endpoint,
        socket=node.local_socket,
        metrics_url=node.metrics_url,
        node_id=node.node_id.hex(),
    )


def _address(name: str, text: str) -> TcpAddress:
    try:
        return TcpAddress.parse(text)
    except ValueError as error:
        raise StartupFailed(f"bad configuration: {name}: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
