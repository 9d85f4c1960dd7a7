"""Quotas as they are configured."""

from __future__ import annotations

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool_pagestore.core.admission import TenantQuotas


def test_tenants_have_their_own_and_all_others_one_alike() -> None:
    quotas = TenantQuotas.parse(("a=5", "team=x=7", "*=9"))
    assert [quotas.of(tenant) for tenant in ("a", "team=x", "other")] == [5, 7, 9]
    assert TenantQuotas.parse(("a=5",)).of("other") == 0
    assert TenantQuotas.parse(()).of("a") == 0


@pytest.mark.parametrize("entry", ["a", "=5", "a=", "a=-1", "a=1GiB"])
def test_an_entry_that_is_none_is_named(entry: str) -> None:
    with pytest.raises(InvalidRequest, match="tenant quota"):
        TenantQuotas.parse((entry,))
    with pytest.raises(InvalidRequest, match="each tenant once"):
        TenantQuotas.parse(("a=1", "a=2"))
