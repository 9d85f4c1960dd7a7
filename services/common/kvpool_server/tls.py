"""TLS of a service: one block of settings for what it serves and for whom it calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Final

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvpool.core.errors import InvalidRequest, StartupFailed
from kvpool.wire.tls import TlsCredentials
from kvpool.wire.tls_files import TlsFiles

_TOGETHER: Final = ("tls_cert_file", "tls_key_file", "tls_ca_file")


class ClientAuth(Enum):
    """Whether callers must show a certificate."""

    NONE = "none"
    REQUIRE = "require"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """Inherited by each service's configuration; `open_tls` makes what it says."""

    tls_cert_file: Annotated[
        Path | None, "PEM certificate chain of this service, leaf first, to callers and peers; unset: no TLS"
    ] = None
    tls_key_file: Annotated[Path | None, "PEM private key of that certificate, without a passphrase"] = None
    tls_ca_file: Annotated[Path | None, "PEM bundle of the CAs that peers' and callers' certificates come from"] = None
    tls_client_auth: Annotated[
        ClientAuth, "require: callers need a certificate of those CAs (mutual TLS); none: callers need none"
    ] = ClientAuth.REQUIRE
    tls_server_name: Annotated[
        str, "name that all servers' certificates must have, instead of the host called; empty: the host"
    ] = ""
    health_listen: Annotated[
        str, "host:port that answers gRPC health checks alone and in the clear, for probes without TLS; empty: none"
    ] = ""


class ServiceTls:
    """What a service's servers listen with and its clients call with."""

    def __init__(self, credentials: TlsCredentials, client_auth: ClientAuth) -> None:
        self.client = credentials
        self._client_auth = client_auth

    def server(self) -> grpc.ServerCredentials:
        """Return the credentials for one server."""
        return self.client.server_credentials(require_client_cert=self._client_auth is ClientAuth.REQUIRE)


def open_tls(settings: TlsSettings, registry: CollectorRegistry, *, service: str) -> ServiceTls | None:
    """TLS by the settings, shown in the metrics; None for a plain service. Raises StartupFailed."""
    missing = [name for name in _TOGETHER if getattr(settings, name) is None]
    if missing and (len(missing) < len(_TOGETHER) or settings.tls_server_name):
        raise StartupFailed(f"bad configuration: TLS needs all of {', '.join(_TOGETHER)}; set {', '.join(missing)}")
    if settings.tls_ca_file is None:
        return None
    try:
        credentials = TlsCredentials(
            TlsFiles(ca_file=settings.tls_ca_file, cert_file=settings.tls_cert_file, key_file=settings.tls_key_file),
            server_name=settings.tls_server_name,
        )
    except InvalidRequest as error:
        raise StartupFailed(error.message) from error
    registry.register(_Certificates(credentials, service))
    return ServiceTls(credentials, settings.tls_client_auth)


class _Certificates(Collector):
    """Read at each scrape, so that a renewal is seen, and an expiry logged, even without connections."""

    def __init__(self, credentials: TlsCredentials, service: str) -> None:
        self._credentials = credentials
        self._prefix = f"kvpool_{service}_certificate"

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        material = self._credentials.current()
        expiry = GaugeMetricFamily(
            f"{self._prefix}_expiry_timestamp_seconds",
            "Unix time at which the certificate in use ends: the service's own, or the CA's that ends first.",
            labels=["certificate"],
        )
        if material.validity is not None:
            expiry.add_metric(["own"], material.validity.not_after_s)
        expiry.add_metric(["ca"], material.ca_validity.not_after_s)
        yield expiry
        failures = CounterMetricFamily(
            f"{self._prefix}_reload_failures",
            "Renewed certificate files that could not be used; the last good ones stay in use.",
        )
        failures.add_metric([], self._credentials.reload_failure_count)
        yield failures
