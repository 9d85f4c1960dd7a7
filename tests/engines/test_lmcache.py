"""The L2 adapter under the real LMCache: see lmcache_check and lmcache_server_check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engines.environments import REPOSITORY, run_check
from tests.fixtures.direct_cluster import direct_cluster

pytestmark = pytest.mark.e2e


def test_the_adapter_serves_lmcaches_own_interface(tmp_path: Path) -> None:
    with direct_cluster(tmp_path) as cluster:
        reported = run_check("lmcache_check", {"settings": cluster.settings(), "pagestore_pid": cluster.store().pid})
    assert reported["checked"]


@pytest.mark.parametrize("check", ["server", "storage"])
def test_lmcache_itself_with_the_quick_starts_command_line(tmp_path: Path, check: str) -> None:
    given: dict[str, Any] = {"quickstart": str(REPOSITORY / "docs/quickstart-lmcache.md"), "check": check}
    with direct_cluster(tmp_path) as cluster:
        given |= {"settings": cluster.settings(), "pagestore_pid": cluster.store().pid}
        reported = run_check("lmcache_server_check", given)
    assert reported["checked"]
