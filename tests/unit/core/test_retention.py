"""How long pages are kept."""

from __future__ import annotations

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.core.retention import PINNED_FOREVER_US, Retention


def test_expiry_never_overflows() -> None:
    assert Retention(ttl_ms=7).expires_us(1000) == 8000
    assert Retention().expires_us(1000) == 0
    assert Retention(ttl_ms=PINNED_FOREVER_US).expires_us(1000) == PINNED_FOREVER_US


def test_a_malformed_retention_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"range 3\.priority"):
        Retention(priority=-101).check("range 3")
