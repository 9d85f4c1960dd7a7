"""Domain errors. None knows a gRPC code: `kvpool.wire` maps each class, and clients invert the map by `reason`.

An error means a broken contract or broken infrastructure; a miss is a value (see `outcome`). Every class can be built
from its message alone. Its `advice` says what to do next and is appended once, so that a message survives a round trip.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class KvPoolError(Exception):
    """Base of all errors that kvpool raises on purpose.

    reason: stable API, upper snake case, sent as trailing metadata. `message` is for people and may change.
    """

    reason: ClassVar[str] = "INTERNAL"
    advice: ClassVar[str] = ""

    def __init__(self, message: str) -> None:
        if self.advice and not message.endswith(self.advice):
            message = f"{message}; {self.advice}"
        super().__init__(message)

    @property
    def message(self) -> str:
        return str(self)

    @classmethod
    def from_message(cls, reason: str, message: str) -> KvPoolError:
        """The error a peer reported. An unknown reason (a newer peer) becomes a plain KvPoolError that names it."""
        error_type = ERRORS_BY_REASON.get(reason)
        return error_type(message) if error_type else KvPoolError(f"{reason}: {message}")


class InvalidRequest(KvPoolError):
    """An argument breaks the API's contract. The message names it; `item_index` is the item of a batch, if any."""

    reason = "INVALID_REQUEST"

    def __init__(self, message: str, *, item_index: int | None = None) -> None:
        super().__init__(message)
        self.item_index = item_index


class KeyspaceMismatch(KvPoolError):
    """A keyspace name is bound to another specification. `field` names the first that differs ("" if unknown)."""

    reason = "KEYSPACE_MISMATCH"
    advice = "open it under another name or with the specification it was first opened with"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class KeyspaceUnknown(KvPoolError):
    """No such keyspace for this tenant."""

    reason = "KEYSPACE_UNKNOWN"
    advice = "open the keyspace first"


class PartitionRefused(KvPoolError):
    """A rank's layers and heads are no union of shards; the message names the grid."""

    reason = "PARTITION_REFUSED"
    advice = "choose a TP and PP split whose borders lie on the grid's"


class GeometryUnsupported(KvPoolError):
    """Layers of unequal KV in one keyspace, or state-space KV; the message names what was asked for."""

    reason = "GEOMETRY_UNSUPPORTED"
    advice = "run this model without kvpool"


class PageCorrupt(KvPoolError):
    """Bytes do not match their checksums or key."""

    reason = "PAGE_CORRUPT"
    advice = "drop the page and recompute the prefix"


class PageMissing(KvPoolError):
    """A page that the contract promised is not there (a plain miss is an Outcome, not this)."""

    reason = "PAGE_MISSING"
    advice = "treat it as a miss and recompute the prefix"


class ArenaFull(KvPoolError):
    """No slot can be freed: everything is leased, dirty or quarantined."""

    reason = "ARENA_FULL"
    advice = "recompute now; release leases or enlarge the arena"


class QuotaExceeded(KvPoolError):
    """A tenant's or session's share is used up."""

    reason = "QUOTA_EXCEEDED"
    advice = "release pages or raise the quota"


class StaleIncarnation(KvPoolError):
    """The node has restarted since its location was learnt."""

    reason = "STALE_INCARNATION"
    advice = "report the location as stale and match again"


class LeaseLost(KvPoolError):
    """A lease named in the request is no longer held."""

    reason = "LEASE_LOST"
    advice = "stop using its slots and reserve or acquire again"


class SessionUnknown(KvPoolError):
    """The session id is not (or no longer) known here."""

    reason = "SESSION_UNKNOWN"
    advice = "open a new session"


class SessionBusy(KvPoolError):
    """Another stream already serves this session."""

    reason = "SESSION_BUSY"
    advice = "close the other stream or open a session of your own"


class WireVersionRefused(KvPoolError):
    """Client and service speak versions that do not fit. The message names both."""

    reason = "WIRE_VERSION_REFUSED"
    advice = "upgrade the older side; releases that follow each other understand each other"


class TenantDenied(KvPoolError):
    """The authenticated tenant has no right to this."""

    reason = "TENANT_DENIED"
    advice = "use a keyspace of your own tenant"


class Unauthenticated(KvPoolError):
    """The caller's identity could not be established."""

    reason = "UNAUTHENTICATED"
    advice = "check the credentials that this client sends"


class NotServed(KvPoolError):
    """A part of the API that this version does not serve; the message names it and says why."""

    reason = "NOT_SERVED"


class StoreUnavailable(KvPoolError):
    """The backing store (Redis) cannot be reached."""

    reason = "STORE_UNAVAILABLE"
    advice = "recompute now; it recovers without a restart once the store is back"


class ServiceUnavailable(KvPoolError):
    """A kvpool service cannot be reached or went away in the middle of a call."""

    reason = "SERVICE_UNAVAILABLE"
    advice = "recompute now and reconnect"


class TlsFailed(ServiceUnavailable):
    """A TLS connection to a service could not be made; the message says what did not fit and what to change."""

    reason = "TLS_FAILED"
    advice = "nothing is sent in the clear instead"


class Draining(KvPoolError):
    """The service is shutting down and takes no new work."""

    reason = "DRAINING"
    advice = "use another replica or retry after the restart"


class DrainBlocked(KvPoolError):
    """Pages of a node that is to be drained can go nowhere, or its drain is in no state for what was asked."""

    reason = "DRAIN_BLOCKED"
    advice = "add a pagestore or room on one, then drain again"


class DeadlineExceeded(KvPoolError):
    """The caller's deadline passed. Leases follow their own rules and may outlive the call."""

    reason = "DEADLINE_EXCEEDED"
    advice = "recompute now or allow more time"


class Overloaded(KvPoolError):
    """A bounded queue is full."""

    reason = "OVERLOADED"
    advice = "back off and retry"


class StoreFault(KvPoolError):
    """Disk input or output failed."""

    reason = "STORE_FAULT"
    advice = "check the disk and the log of the node"


class Stopped(KvPoolError):
    """Work ended early because somebody asked for that or left; nothing of it is visible."""

    reason = "STOPPED"
    advice = "ask again if it is still wanted"


class ExportRefused(KvPoolError):
    """A file of exported pages is damaged, forged, or of another keyspace; nothing of it was used."""

    reason = "EXPORT_REFUSED"


class StartupFailed(KvPoolError):
    """A process cannot start as configured: one clear line, exit code 2."""

    reason = "STARTUP_FAILED"


def _concrete_errors() -> dict[str, type[KvPoolError]]:
    found, rest = dict[str, type[KvPoolError]](), KvPoolError.__subclasses__()
    while rest:
        error_type = rest.pop(0)
        found[error_type.reason] = error_type
        rest += error_type.__subclasses__()
    return found


ERRORS_BY_REASON: Mapping[str, type[KvPoolError]] = MappingProxyType(_concrete_errors())
"""Every error a peer may report, by its stable reason."""
