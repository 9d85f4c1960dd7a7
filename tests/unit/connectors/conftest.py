"""Fixtures of all connectors' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool.connectors.vllm.switch_interval import switch_interval


@pytest.fixture(autouse=True)
def _no_work_left_behind() -> Iterator[None]:
    """Lookups and loads that a test has left behind shorten the interval of no other."""
    yield
    while switch_interval._holders:
        switch_interval.restore()
