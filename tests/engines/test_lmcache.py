"""The L2 adapter under the real LMCache: see lmcache_check."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.environments import run_check
from tests.fixtures.direct_cluster import direct_cluster

pytestmark = pytest.mark.e2e


def test_the_adapter_serves_lmcaches_own_interface(tmp_path: Path) -> None:
    with direct_cluster(tmp_path) as cluster:
        told = run_check("lmcache_check", {"settings": cluster.settings(), "pagestore_pid": cluster.store().pid})
    assert told["checked"]
