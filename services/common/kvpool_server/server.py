"""The gRPC servers of a service: control calls on the event loop, bulk byte streams on threads.

The control server has health checking and server reflection. The bulk server has a port of its own.
"""

import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvpool.core.errors import StartupFailed
from kvpool_server.interceptors.errors import AioErrors, AioMessages
from kvpool_server.interceptors.limits import AioLimits, CallLimits
from kvpool_server.listen import TcpAddress, check_tcp, claim_unix_path, restricted_umask
from kvpool_server.tls import ServiceTls

_UNIX_SCHEME: Final = "unix:"
LIVENESS: Final = "liveness"  # health service for restarts: whether the process still answers
_HEALTH_CALLS: Final = CallLimits(open_calls=1024, peer_open_calls=64, request_s=10.0)  # probes are few and short


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcLimits:
    """Transport limits, the same for the control and the bulk server unless a service says otherwise."""

    max_message_bytes: int = 8 << 20  # of a request or a response
    max_concurrent_streams: int = 1024  # calls in flight on one connection
    keepalive_time_s: float = 20.0  # a silent connection is pinged after this
    keepalive_timeout_s: float = 10.0  # and dropped when the ping is not answered within this
    min_ping_interval_s: float = 5.0  # connections that ping more often are closed
    handshake_timeout_s: float = 20.0  # a connection without a handshake by then is closed

    def options(self) -> list[tuple[str, int]]:
        """The channel arguments of a server."""
        return [
            ("grpc.so_reuseport", 0),  # or a second process would silently take half of the connections
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_concurrent_streams", self.max_concurrent_streams),
            ("grpc.keepalive_time_ms", int(self.keepalive_time_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_timeout_s * 1000)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", int(self.min_ping_interval_s * 1000)),
            ("grpc.server_handshake_timeout_ms", int(self.handshake_timeout_s * 1000)),
        ]


class ControlServer:
    """A grpc.aio server that reports its health.

    Add servicers to `grpc`, `listen`, `start`; then `set_serving(True)` when the service is ready for work, and
    `stop` to end. `service_names` are the full protobuf names that health and reflection answer for.
    """

    def __init__(
        self,
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
        service_names: Collection[str],
        limits: GrpcLimits | None = None,
    ) -> None:
        self.grpc = grpc.aio.server(
            interceptors=list(interceptors), options=(limits if limits is not None else GrpcLimits()).options()
        )
        self._service_names = tuple(service_names)
        self._unix_paths: list[Path] = []
        self._health_grpc: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection(
            (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
        )

    def listen_tcp(self, address: TcpAddress, tls: ServiceTls | None = None) -> int:
        """Bind `address` and return its port; plain without `tls`. Call before `start`. Raises StartupFailed."""
        check_tcp(address)
        return bind_port(self.grpc, address, tls)

    def listen_health(self, address: TcpAddress, *, idle_s: float = 30.0, limits: CallLimits = _HEALTH_CALLS) -> int:
        """Bind `address` for health checks and nothing else, in the clear; returns its port. Raises StartupFailed.

        Any caller may connect there, so nothing lasts: no Watch, an idle connection is closed after idle_s, and a Check
        whose request does not come is ended by the limits.
        """
        check_tcp(address)
        options = [*GrpcLimits(max_message_bytes=1 << 16).options(), ("grpc.max_connection_idle_ms", int(idle_s * 1e3))]
        interceptors = [AioErrors(), AioLimits(limits), AioMessages()]
        self._health_grpc = grpc.aio.server(interceptors=interceptors, options=options)
        check = grpc.unary_unary_rpc_method_handler(
            self._health.Check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check})
        self._health_grpc.add_generic_rpc_handlers((handler,))
        return bind_port(self._health_grpc, address, None)

    def listen_unix(self, path: Path, *, group_access: bool = False) -> None:
        """Bind a unix socket that only this user, or also its file's group, may use.

        Call before `start`. Raises StartupFailed.
        """
        claim_unix_path(path)
        # The umask is the process's: services listen at start, before other threads make files.
        old_umask = restricted_umask(group_access)
        try:
            self.grpc.add_insecure_port(f"{_UNIX_SCHEME}{path.absolute()}")
            path.chmod(0o660 if group_access else 0o600)
        except (RuntimeError, OSError) as error:
            raise StartupFailed(f"cannot listen on {path}: {error}; configure another path") from error
        finally:
            os.umask(old_umask)
        self._unix_paths.append(path)

    async def start(self) -> None:
        """Begin to answer. Health says NOT_SERVING until `set_serving(True)`, except of liveness."""
        await self.set_serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self.grpc.start()
        if self._health_grpc is not None:
            await self._health_grpc.start()

    async def set_serving(self, serving: bool) -> None:
        """Publish whether the service is ready: for the server as a whole and for each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._service_names):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING, refuse new calls, let running ones end within the grace, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
        if self._health_grpc is not None:
            await self._health_grpc.stop(0)
        for path in self._unix_paths:
            path.unlink(missing_ok=True)


def bind_port(server: grpc.Server | grpc.aio.Server, address: TcpAddress, tls: ServiceTls | None) -> int:
    """Bind one TCP address that `check_tcp` found free; returns the port. Raises StartupFailed."""
    try:
        if tls is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), tls.server())
    except RuntimeError as error:
        # Free a moment ago: someone else was faster.
        raise StartupFailed(f"cannot listen on {address}: it was just taken; configure another port") from error
    if port == 0:  # how older grpcio reports a failure
        raise StartupFailed(f"cannot listen on {address}: it was just taken; configure another port")
    return port


class BulkServer:
    """A grpc.Server whose every call runs on one of `threads` threads from its start to its end.

    More calls than threads are refused with RESOURCE_EXHAUSTED at once, and not queued: a caller that waits unseen
    would run into its deadline. Add servicers to `grpc`, `listen_tcp`, `start`, `stop`.
    """

    def __init__(
        self, *, threads: int, interceptors: Sequence[grpc.ServerInterceptor], limits: GrpcLimits | None = None
    ) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="bulk")
        self.grpc = grpc.server(
            self._pool,
            interceptors=list(interceptors),
            options=(limits if limits is not None else GrpcLimits()).options(),
            maximum_concurrent_rpcs=threads,
        )

    def listen_tcp(self, address: TcpAddress, tls: ServiceTls | None = None) -> int:
        """Bind `address` and return its port; plain without `tls`. Call before `start`. Raises StartupFailed."""
        check_tcp(address)
        return bind_port(self.grpc, address, tls)

    def start(self) -> None:
        """Begin to answer."""
        self.grpc.start()

    def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end within the grace, then cancel them. Blocks: call it on a thread."""
        self.grpc.stop(grace_s).wait()
        self._pool.shutdown(wait=True)
