"""Whether bytes may be taken for a page: one ordered list of rules, and the quotas that one of them keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from kvpool.core.errors import InvalidRequest, KvPoolError
from kvpool_pagestore.core.slots import PageRecord


class AdmissionPurpose(Enum):
    """What the bytes are for."""

    STORE = auto()  # a slot for a page that a session writes, an engine's or one that another node sends
    FILL = auto()  # a slot for a page that comes from disk or is pulled from a peer
    WRITE_BACK = auto()  # a staged page's bytes on disk


class AdmissionRequest(NamedTuple):
    """A page that is to take bytes: of its slot, or what it is charged on disk. Or the first of several pages of one
    keyspace, none to be pinned, and the bytes of all."""

    purpose: AdmissionPurpose
    record: PageRecord
    size_bytes: int


AdmissionRule = Callable[[AdmissionRequest], KvPoolError | None]
"""Why the page may not have the bytes. A rule may make room among pages of the same owner."""


class AdmissionRules:
    """All rules. Use from one thread only."""

    def __init__(self) -> None:
        self._rules: tuple[AdmissionRule, ...] = ()

    def set_rules(self, rules: tuple[AdmissionRule, ...]) -> None:
        """List all rules, once, in the order in which they are asked."""
        if self._rules:
            raise RuntimeError("the rules are listed already; add to that list")
        self._rules = rules

    def refusal(self, request: AdmissionRequest) -> KvPoolError | None:
        """What the first rule says that refuses; None if none does."""
        for rule in self._rules:
            refused = rule(request)
            if refused is not None:
                return refused
        return None


@dataclass(frozen=True, slots=True)
class TenantQuotas:
    """Bytes that each tenant may have; 0: no quota. other_bytes: of tenants that are not named."""

    named_bytes: Mapping[str, int]
    other_bytes: int = 0

    def of(self, tenant: str) -> int:
        """0: no quota."""
        return self.named_bytes.get(tenant, self.other_bytes)

    @classmethod
    def parse(cls, entries: tuple[str, ...]) -> TenantQuotas:
        """Parse "tenant=bytes" entries, with "*" for all other tenants. Raises InvalidRequest naming the entry."""
        named_bytes: dict[str, int] = {}
        for entry in entries:
            tenant, _, text = entry.rpartition("=")
            if not tenant or not text.isdecimal() or tenant in named_bytes:
                raise InvalidRequest(f"tenant quota {entry!r} must be tenant=bytes, each tenant once, * for all others")
            named_bytes[tenant] = int(text)
        return cls(named_bytes, named_bytes.pop("*", 0))


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Bytes that must be given up by pages of these keyspaces before more may be taken."""

    size_bytes: int
    keyspaces: AbstractSet[bytes]  # as they are now: a tenant may have thousands
    owner: str  # for people: whose quota it is, and how large
    tenant: str = ""  # whose keyspaces these all are; empty: it is about one keyspace


class QuotaBook:
    """What each keyspace uses, and what it may. Use from one thread only."""

    def __init__(self, tenants: TenantQuotas) -> None:
        self._tenants = tenants
        self._tenant_of: dict[bytes, str] = {}
        self._keyspaces_of: dict[str, set[bytes]] = {}
        self._used_bytes: dict[bytes, int] = {}
        self._tenant_bytes: dict[str, int] = {}
        self._limits_bytes: dict[bytes, int] = {}

    def know(self, keyspace: bytes, tenant: str) -> None:
        """Whose keyspace it is; before anything is counted for it."""
        if self._tenant_of.setdefault(keyspace, tenant) == tenant:
            self._keyspaces_of.setdefault(tenant, set()).add(keyspace)

    def knows(self, keyspace: bytes) -> bool:
        return keyspace in self._tenant_of

    def limit(self, keyspace: bytes, limit_bytes: int) -> None:
        """The keyspace's own quota; 0 for none. Nothing is given up by this alone."""
        self._limits_bytes[keyspace] = limit_bytes

    def add(self, keyspace: bytes, size_bytes: int) -> None:
        """Bytes were taken for a keyspace, or (< 0) came back."""
        tenant = self._tenant_of[keyspace]
        self._used_bytes[keyspace] = self._used_bytes.get(keyspace, 0) + size_bytes
        self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + size_bytes

    def used_bytes(self, keyspace: bytes) -> int:
        return self._used_bytes.get(keyspace, 0)

    def tenant_bytes(self, tenant: str) -> int:
        return self._tenant_bytes.get(tenant, 0)

    def used_for(self, shortfall: Shortfall) -> int:
        """What its keyspaces use together."""
        if shortfall.tenant:
            return self.tenant_bytes(shortfall.tenant)
        return sum(map(self.used_bytes, shortfall.keyspaces))

    def shortfalls(self, keyspace: bytes, more_bytes: int) -> list[Shortfall]:
        """What stands in the way of `more_bytes` (0: of what there is) for a keyspace: its own quota first."""
        found: list[Shortfall] = []
        limit_bytes = self._limits_bytes.get(keyspace, 0)
        if limit_bytes and (over_bytes := self.used_bytes(keyspace) + more_bytes - limit_bytes) > 0:
            found.append(Shortfall(over_bytes, frozenset((keyspace,)), f"the keyspace's quota of {limit_bytes} bytes"))
        tenant = self._tenant_of[keyspace]
        limit_bytes = self._tenants.of(tenant)
        if limit_bytes and (over_bytes := self.tenant_bytes(tenant) + more_bytes - limit_bytes) > 0:
            owner = f"the tenant's quota of {limit_bytes} bytes"
            found.append(Shortfall(over_bytes, self._keyspaces_of[tenant], owner, tenant))
        return found
