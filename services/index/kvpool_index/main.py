"""The index process: `python -m kvpool_index.main --listen 127.0.0.1:7100`."""

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import kvpool
from kvpool.core.clock import SystemClock
from kvpool.core.errors import StartupFailed
from kvpool.core.keyspace import PUBLISHED_TENANT_SECRET, secret_from_file_content
from kvpool.v1 import index_pb2
from kvpool_index.adapters.memory import MemoryIndexStore
from kvpool_index.config import IndexConfig
from kvpool_index.engine.index import IndexEngine
from kvpool_index.metrics import IndexMetrics
from kvpool_index.ports import IndexStore
from kvpool_index.servicer import IndexServicer, add_index_servicer
from kvpool_server.config import describe
from kvpool_server.interceptors import (
    CallLimits,
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
from kvpool_server.process import tune_process
from kvpool_server.server import ControlServer
from kvpool_server.service import run_with_settings, serve_metrics
from kvpool_server.tasks import BackgroundTasks
from kvpool_server.tls import open_tls

_log = logging.getLogger(__name__)

_SERVICE_NAME = index_pb2.DESCRIPTOR.services_by_name["IndexService"].full_name


def main() -> int:
    """Run the service; returns the exit code of kvpool_server.lifecycle."""
    return run_with_settings(_serve, IndexConfig, service="index")


async def _serve(stop: Stop, config: IndexConfig) -> None:
    tune_process()
    clear_ready_file(config.ready_file)
    _log.info("starting", extra=fields(version=kvpool.__version__, **describe(config)))
    listen = parse_address("listen", config.listen)
    registry = new_registry()
    metrics_url, stop_metrics = serve_metrics(config, registry)
    tls = open_tls(config, registry, service="index")
    tracer = open_service_tracer("index", registry)
    store = _open_store(config)
    engine = IndexEngine(
        store=store,
        config=config,
        clock=SystemClock(),
        metrics=IndexMetrics(registry),
        secret_of=_tenant_secrets(config),
        version=kvpool.__version__,
        tracer=tracer,
    )
    server = build_server(engine, config, RequestMetrics("index", registry))
    endpoint = str(TcpAddress(listen.host, server.listen_tcp(listen, tls)))
    if config.health_listen:
        server.listen_health(parse_address("health_listen", config.health_listen))
    try:
        await store.check_layout()
        await server.start()
        async with BackgroundTasks(on_fatal=stop.fail) as tasks:
            for name, work in engine.background_work():
                tasks.start(work, name=name)
            await server.set_serving(True)
            _log.info(
                "serving",
                extra=fields(endpoint=endpoint, metrics_url=metrics_url, store=store.kind, tls=tls is not None),
            )
            gc.freeze()  # what was made at start stays: no later collection has to walk over it
            write_ready_file(config.ready_file, endpoint=endpoint, metrics_url=metrics_url, store=store.kind)
            await stop.wait()
    finally:
        engine.streams.end_all()
        await server.stop(config.drain_s)
        await engine.close()
        await store.close()
        await asyncio.to_thread(tracer.close)
        stop_metrics()


def build_server(engine: IndexEngine, config: IndexConfig, metrics: RequestMetrics) -> ControlServer:
    """The gRPC server of an engine, with everything that goes around its calls; not listening yet."""
    server = ControlServer(
        interceptors=aio_interceptors(
            metrics=metrics,
            authenticator=DefaultTenantAuthenticator(config.tenant),
            deadlines=DeadlinePolicy(),
            limits=CallLimits(open_calls=config.max_open_calls, peer_open_calls=config.max_peer_open_calls),
            tracer=engine.tracer,
        ),
        service_names=[_SERVICE_NAME],
    )
    servicer = IndexServicer(engine, lambda: current_identity().tenant)
    add_index_servicer(servicer, server.grpc)
    return server


def _open_store(config: IndexConfig) -> IndexStore:
    if not config.redis_url:
        _log.warning("no redis_url: what the index knows lives in this process alone and ends with it")
        return MemoryIndexStore(
            SystemClock(),
            chunk_stream_count=config.event_streams,
            stream_entries=config.event_stream_entries,
        )
    from kvpool_index.adapters.redis_store import RedisIndexStore  # only a Redis store needs the driver

    return RedisIndexStore(
        config.redis_url,
        timeout_s=config.redis_timeout_ms / 1000,
        max_in_flight=config.redis_max_in_flight,
        key_prefix=config.redis_key_prefix,
        chunk_stream_count=config.event_streams,
        stream_entries=config.event_stream_entries,
        wait_replicas=config.redis_wait_replicas,
    )


def _tenant_secrets(config: IndexConfig) -> Callable[[str], bytes]:
    """Return the function that gives a tenant's secret: one secret, because all callers are one tenant."""
    secret = _read_secret(config.tenant_secret_file)
    return lambda tenant: secret


def _read_secret(path: Path | None) -> bytes:
    if path is None:
        _log.warning("no tenant_secret_file: chunk hashes are keyed with a published constant, which protects nothing")
        return PUBLISHED_TENANT_SECRET
    try:
        return secret_from_file_content(path.read_bytes())
    except OSError as error:
        raise StartupFailed(f"cannot read tenant_secret_file {path}: {error.strerror}") from error
    except ValueError as error:
        raise StartupFailed(f"tenant_secret_file {path} cannot be used: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
