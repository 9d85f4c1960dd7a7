"""Settings of the client library. A default is written once, here."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpool.core.errors import InvalidRequest
from kvpool.core.tracing import NO_TRACER, Tracer

if TYPE_CHECKING:
    from kvpool.wire.tls import TlsCredentials


def _default_tracer() -> Tracer:
    """That of the process; loads nothing where neither the engine nor the environment has to do with OpenTelemetry."""
    if "opentelemetry.sdk.trace" not in sys.modules and not any(name.startswith("OTEL_") for name in os.environ):
        return NO_TRACER
    from kvpool.tracing.process import process_tracer

    return process_tracer()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """How clients reach the services and how long they wait. One value serves all clients of a process."""

    index_endpoints: tuple[str, ...] = ()  # "host:port" or "unix:/path"; several: tried in turn
    agent_endpoint: str = ""  # of this rank's gpuagent, usually "unix:/path"
    bearer_token: str = field(default="", repr=False)  # sent as `authorization`; empty: none
    tls: TlsCredentials | None = None  # for every "host:port"; None: plain. Unix sockets never have TLS
    host_id: str = ""  # identity of this machine, to prefer its pagestore
    call_timeout_s: float = 5.0  # of a unary call, its retries included
    match_timeout_s: float = 0.5  # of a match on the hot path: later than that, recomputing has begun anyway
    connect_timeout_s: float = 5.0  # of opening a session
    load_timeout_s: float = 30.0
    load_grace_s: float = 1.0  # the agent keeps to a load's deadline itself; so much longer is its answer waited for
    store_timeout_s: float = 120.0  # of waiting for a store's end; the hold on blocks is not bounded by it
    backoff_initial_s: float = 0.05
    backoff_max_s: float = 5.0
    requests_in_flight_max: int = 256  # per stream; more wait, within their deadline
    message_bytes_max: int = 16 << 20  # of control messages; bulk transfer has limits of its own
    keepalive_time_s: float = 30.0  # a silent connection is pinged after this
    tracer: Tracer = field(default_factory=_default_tracer, repr=False, compare=False)  # by default of the process

    def __post_init__(self) -> None:
        """raises: InvalidRequest naming the field."""
        for name in (
            "call_timeout_s",
            "match_timeout_s",
            "connect_timeout_s",
            "load_timeout_s",
            "load_grace_s",
            "store_timeout_s",
            "backoff_initial_s",
            "backoff_max_s",
            "requests_in_flight_max",
            "message_bytes_max",
            "keepalive_time_s",
        ):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name} must be > 0, got {getattr(self, name)}")
        if self.backoff_max_s < self.backoff_initial_s:
            raise InvalidRequest(f"backoff_max_s must be at least backoff_initial_s, got {self.backoff_max_s}")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return (("authorization", f"Bearer {self.bearer_token}"),) if self.bearer_token else ()
