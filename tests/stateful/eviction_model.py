"""What any eviction policy may do, as a naive model: sets and walks over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool_pagestore.core.eviction import EvictionPolicy
from kvpool_pagestore.core.retained import Retention

# A forest: 0 and 1 are heads, and the parent of any other is its number halved.
KEYS = st.integers(0, 11)
DOMAINS = ("even", "odd")
TIMES_US = st.sampled_from([0, 0, 10, 20, 30])
RETENTIONS = st.builds(Retention, st.sampled_from([0, 0, -5, 5]), TIMES_US, TIMES_US)


def parent_of(key: int) -> int | None:
    return key // 2 if key > 1 else None


def ancestors(key: int) -> set[int]:
    above = parent_of(key)
    return set() if above is None else {above} | ancestors(above)


@dataclass(slots=True)
class Entry:
    """A key that is inside."""

    domain: str
    retention: Retention
    is_held: bool = False

    def is_free(self, now_us: int) -> bool:
        return not self.is_held and self.retention.pinned_until_us <= now_us

    def level(self, now_us: int) -> int:
        return -1000 if 0 < self.retention.expires_us <= now_us else self.retention.priority


class EvictionMachine(RuleBasedStateMachine):
    """`make` makes the policy; `keeps_chains`: whether no key may go before what comes after it in its chain."""

    make: Callable[[], EvictionPolicy[int]]
    keeps_chains = False

    def __init__(self) -> None:
        super().__init__()
        self.policy = type(self).make()
        self.inside: dict[int, Entry] = {}
        self.now_us = 0

    @rule(key=KEYS, retention=RETENTIONS, is_unlikely=st.booleans())
    def insert(self, key: int, retention: Retention, is_unlikely: bool = False) -> None:
        domain = DOMAINS[key % 2]
        self.policy.insert(key, parent_of(key), domain=domain, retention=retention, is_unlikely=is_unlikely)
        is_held = key in self.inside and self.inside[key].is_held
        self.inside[key] = Entry(domain, retention, is_held)

    @precondition(lambda self: len(self.inside) < 4)
    @rule(key=KEYS, retention=RETENTIONS)
    def restore(self, key: int, retention: Retention) -> None:
        if key not in self.inside:
            self.policy.restore(key, parent_of(key), domain=DOMAINS[key % 2], retention=retention)
            self.inside[key] = Entry(DOMAINS[key % 2], retention)

    @rule(key=KEYS)
    def use_chain(self, key: int) -> None:
        """A request: all keys of a chain, from its head on."""
        above = parent_of(key)
        if above is not None:
            self.use_chain(above)
        self.insert(key, Retention())

    @rule(key=KEYS)
    def touch(self, key: int) -> None:
        self.policy.touch(key)

    @rule(key=KEYS, holds=st.booleans())
    def hold_or_release(self, key: int, holds: bool) -> None:
        (self.policy.hold if holds else self.policy.release)(key)
        if key in self.inside:
            self.inside[key].is_held = holds

    @rule(key=KEYS, retention=RETENTIONS)
    def retain(self, key: int, retention: Retention) -> None:
        self.policy.retain(key, retention)
        if key in self.inside:
            self.inside[key].retention = retention

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        self.policy.remove(key)
        self.inside.pop(key, None)

    @rule(step_us=st.sampled_from([5, 10]))
    def wait(self, step_us: int) -> None:
        self.now_us += step_us

    @precondition(lambda self: self.inside)
    @rule(
        domains=st.sampled_from([None, None, ("even",), ("odd", "none")]),
        spared=st.one_of(st.just(frozenset[int]()), st.frozensets(KEYS)),
    )
    def evict(self, domains: tuple[str, ...] | None, spared: frozenset[int]) -> None:
        free = {
            key: entry.level(self.now_us)
            for key, entry in self.inside.items()
            if entry.is_free(self.now_us) and key not in spared and (domains is None or entry.domain in domains)
        }
        may_go = {key for key in free if not self.keeps_chains or not self.children(key)}
        # Beyond a gap in a chain a policy may or may not know what comes there.
        ends = {key for key in may_go if not self.keeps_chains or not self.has_descendant(key)}
        victim = self.policy.evict(self.now_us, domains=domains, spare=spared.__contains__)
        if victim is None:
            assert not ends
            return
        assert victim in may_go
        assert all(free[victim] <= free[key] for key in ends)
        del self.inside[victim]

    def children(self, key: int) -> set[int]:
        return {other for other in self.inside if parent_of(other) == key}

    def has_descendant(self, key: int) -> bool:
        return any(key in ancestors(other) for other in self.inside)

    @invariant()
    def agrees(self) -> None:
        assert len(self.policy) == len(self.inside)
        assert {key for key in range(12) if key in self.policy} == set(self.inside)
