"""The quota book against a naive model: a list of everything that was ever taken, summed again each time."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool_pagestore.core.admission import QuotaBook, TenantQuotas

OWNERS = {b"a1": "a", b"a2": "a", b"b1": "b", b"c1": "c"}
TENANT_LIMITS = {"a": 50, "b": 30, "c": 0}
keyspaces = st.sampled_from(sorted(OWNERS))


class QuotaMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = QuotaBook(TenantQuotas({"a": 50, "b": 30}))
        self.taken: list[tuple[bytes, int]] = []
        self.limits: dict[bytes, int] = {}
        for keyspace, tenant in OWNERS.items():
            self.book.know(keyspace, tenant)

    def used(self, *names: bytes) -> int:
        return sum(size_bytes for keyspace, size_bytes in self.taken if keyspace in names)

    def siblings(self, keyspace: bytes) -> list[bytes]:
        return [other for other, tenant in OWNERS.items() if tenant == OWNERS[keyspace]]

    def fits(self, keyspace: bytes, size_bytes: int) -> bool:
        own, tenant = self.limits.get(keyspace, 0), TENANT_LIMITS[OWNERS[keyspace]]
        fits_own = not own or self.used(keyspace) + size_bytes <= own
        return fits_own and (not tenant or self.used(*self.siblings(keyspace)) + size_bytes <= tenant)

    @rule(keyspace=keyspaces, size_bytes=st.integers(1, 20))
    def take_if_admitted(self, keyspace: bytes, size_bytes: int) -> None:
        admitted = not self.book.shortfalls(keyspace, size_bytes)
        assert admitted == self.fits(keyspace, size_bytes)
        if admitted:
            self.taken.append((keyspace, size_bytes))
            self.book.add(keyspace, size_bytes)

    @rule(keyspace=keyspaces, size_bytes=st.integers(1, 20))
    def give_up_what_is_asked_and_take(self, keyspace: bytes, size_bytes: int) -> None:
        others = {name: self.used(name) for name, tenant in OWNERS.items() if tenant != OWNERS[keyspace]}
        for shortfall in self.book.shortfalls(keyspace, size_bytes):
            freed = 0
            for entry in [one for one in self.taken if one[0] in shortfall.keyspaces]:
                if freed >= shortfall.size_bytes:
                    break
                self.taken.remove(entry)
                self.book.add(entry[0], -entry[1])
                freed += entry[1]
        assert {name: self.used(name) for name in others} == others, "another tenant's pages were given up"
        limits = [limit for limit in (self.limits.get(keyspace, 0), TENANT_LIMITS[OWNERS[keyspace]]) if limit]
        assert (not self.book.shortfalls(keyspace, size_bytes)) == all(size_bytes <= limit for limit in limits)

    @rule(keyspace=keyspaces, limit_bytes=st.integers(0, 60))
    def change_a_quota(self, keyspace: bytes, limit_bytes: int) -> None:
        self.limits[keyspace] = limit_bytes
        self.book.limit(keyspace, limit_bytes)

    @invariant()
    def agrees_with_the_model(self) -> None:
        for keyspace, tenant in OWNERS.items():
            assert self.book.used_bytes(keyspace) == self.used(keyspace)
            assert self.book.tenant_bytes(tenant) == self.used(*self.siblings(keyspace))
            assert (not self.book.shortfalls(keyspace, 0)) == self.fits(keyspace, 0)
        for tenant, limit_bytes in TENANT_LIMITS.items():
            assert not limit_bytes or self.book.tenant_bytes(tenant) <= limit_bytes


TestQuotaBook = QuotaMachine.TestCase
