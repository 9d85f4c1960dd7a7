"""What all services share: settings, and how a process starts with them."""

import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from prometheus_client import CollectorRegistry

from kvpool_server.config import load_config
from kvpool_server.lifecycle import Stop, run_service
from kvpool_server.listen import TcpAddress, advertised_host, parse_address
from kvpool_server.logs import LogFormat, LogLevel, configure_logs
from kvpool_server.metrics import start_metrics_server
from kvpool_server.process import die_with_parent
from kvpool_server.tls import TlsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings(TlsSettings):
    """Inherited by each service's configuration, whose `__post_init__` calls this one's."""

    metrics_listen: Annotated[str, "host:port of /metrics; port 0 takes a free one"] = "127.0.0.1:0"
    ready_file: Annotated[Path | None, "JSON file to write the bound endpoints to once serving"] = None
    parent_pid: Annotated[int, "end when this process has ended; 0: do not"] = 0
    log_level: Annotated[LogLevel, "the least severe level that is logged"] = LogLevel.INFO
    log_format: Annotated[LogFormat, "logfmt for people, json for collectors"] = LogFormat.LOGFMT
    tenant: Annotated[str, "tenant of all callers, until requests are authenticated"] = "default"

    def __post_init__(self) -> None:
        if not self.tenant:
            raise ValueError("tenant must not be empty")


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def run_with_settings(
    serve: Callable[[Stop, SettingsT], Awaitable[None]], settings_class: type[SettingsT], *, service: str
) -> int:
    """Run `serve` with the settings of the command line and the environment; returns the exit code of lifecycle.

    service: short name, as in "index", of which the program's name and the prefix of its variables are made.
    """

    async def main(stop: Stop) -> None:
        settings = load_config(
            settings_class,
            prog=f"kvpool-{service}",
            env_prefix=f"KVPOOL_{service.upper()}",
            argv=sys.argv[1:],
            env=os.environ,
        )
        configure_logs(service=service, level=settings.log_level, log_format=settings.log_format)
        if settings.parent_pid:
            die_with_parent(settings.parent_pid)
        await serve(stop, settings)

    return run_service(main, service=service)


def serve_metrics(
    settings: ServiceSettings, registry: CollectorRegistry, advertise_host: str = ""
) -> tuple[str, Callable[[], None]]:
    """Serve /metrics. Returns its URL and a function that ends it. Raises StartupFailed.

    advertise_host: where others reach a listener on all interfaces; empty: the URL has the address of the settings.
    """
    listen = parse_address("metrics_listen", settings.metrics_listen)
    port, stop = start_metrics_server(listen.host, listen.port, registry)
    host = advertised_host(listen.host, advertise_host or listen.host)
    return f"http://{TcpAddress(host, port)}/metrics", stop
