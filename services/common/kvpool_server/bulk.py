"""The thread-pool server of bulk byte streams: off the event loop, on a port of its own."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc

from kvpool_server.listen import TcpAddress, check_tcp
from kvpool_server.server import GrpcLimits, bind_port
from kvpool_server.tls import ServiceTls


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
