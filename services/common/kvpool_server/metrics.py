"""The /metrics endpoint, what is known about the process itself, and the service's tracer."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvpool import __version__
from kvpool.core.tracing import Tracer
from kvpool.tracing.process import open_tracer, tracing_wanted
from kvpool_server.listen import startup_error
from kvpool_server.logs import show_trace_of

_log = logging.getLogger(__name__)

_READ_TIMEOUT_S: Final = 5.0
_THREADS_MAX: Final = 16  # requests served at once
_MEMORY_KINDS: Final = {"RssAnon": "anon", "RssFile": "file", "RssShmem": "shmem"}


def new_registry() -> CollectorRegistry:
    """A registry that already holds the metrics of this process: CPU, memory, descriptors, start time."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_ProcessCollector())
    return registry


class _ProcessCollector(Collector):
    """Version, and resident memory by kind: arena pages are shmem, and must not look like a leak of the heap."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        info = GaugeMetricFamily("kvpool_process_info", "1, of the version that this process has.", labels=["version"])
        info.add_metric([__version__], 1.0)
        yield info
        family = GaugeMetricFamily(
            "kvpool_process_resident_bytes", "Resident memory of this process by kind.", labels=["kind"]
        )
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                name, _, rest = line.partition(":")
                if name in _MEMORY_KINDS:
                    family.add_metric([_MEMORY_KINDS[name]], int(rest.split()[0]) * 1024)
        yield family


def start_metrics_server(host: str, port: int, registry: CollectorRegistry) -> tuple[int, Callable[[], None]]:
    """Serve `registry` on http://host:port/metrics from a thread of its own; port 0 takes a free one.

    Returns the bound port and a function that ends the server and waits for its thread. Raises StartupFailed.
    """

    class Handler(_MetricsHandler):
        served = registry

    try:
        server = _Server((host, port), Handler)
    except OSError as error:
        raise startup_error(f"{host}:{port}", error) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return int(server.server_address[1]), stop


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.BoundedSemaphore(_THREADS_MAX)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)  # the scraper tries again; a thread for each would be without bound

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def server_bind(self) -> None:
        # Or a service that was scraped and killed could not start again before the kernel forgets those connections.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # HTTPServer's own looks the host name up in DNS here, which can take seconds.
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _MetricsHandler(BaseHTTPRequestHandler):
    served: CollectorRegistry
    timeout = _READ_TIMEOUT_S  # a peer that sends nothing holds its thread no longer than this

    def do_GET(self) -> None:
        if urlsplit(self.path).path != "/metrics":
            self.send_error(404, explain="only /metrics is served here")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept") or "")
        body = encode(self.served)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        _log.debug(format, *args)


def open_service_tracer(service: str, registry: CollectorRegistry) -> Tracer:
    """What OpenTelemetry's environment variables ask for; records nothing without them. Close it in the end.

    service: short name, as in "index"; the trace's service.name is "kvpool-index" unless the environment says another.
    """
    if not tracing_wanted(os.environ):
        return open_tracer(service, {})
    spans = Counter(
        f"kvpool_{service}_trace_spans",
        "Recorded spans, by fate: exported, or dropped and why.",
        ["fate"],
        registry=registry,
    )
    tracer = open_tracer(
        f"kvpool-{service}", os.environ, lambda fate, span_count: spans.labels(fate.value).inc(span_count)
    )
    show_trace_of(tracer)
    return tracer
