"""Whether bytes may be taken for a page: rules with one signature, in one order, for everything that takes some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvpool.core.errors import KvPoolError
from kvpool_pagestore.core.slots import PageRecord


class AdmissionPurpose(Enum):
    """What the bytes are for."""

    STORE = auto()  # a slot for a page that a session writes, an engine's or one that another node sends
    FILL = auto()  # a slot for a page that comes from disk or is pulled from a peer
    WRITE_BACK = auto()  # a staged page's bytes on disk


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """One page that is to take bytes: of its slot, or what it is charged on disk."""

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
