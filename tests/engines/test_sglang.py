"""The storage backend under the real SGLang: see sglang_check and sglang_controller_check."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.environments import REPOSITORY, run_check
from tests.fixtures.direct_cluster import direct_cluster

pytestmark = pytest.mark.e2e


def test_the_backend_serves_sglangs_own_interface(tmp_path: Path) -> None:
    with direct_cluster(tmp_path) as cluster:
        reported = run_check("sglang_check", {"settings": cluster.settings(), "pagestore_pid": cluster.store().pid})
    assert reported["checked"]


def test_the_quick_starts_command_line_and_hicaches_own_controller(tmp_path: Path) -> None:
    given = {"quickstart": str(REPOSITORY / "docs/quickstart-sglang.md"), "directory": str(tmp_path)}
    with direct_cluster(tmp_path) as cluster:
        settings = cluster.settings(load_timeout_s=5.0, store_timeout_s=5.0)
        reported = run_check(
            "sglang_controller_check", given | {"settings": settings, "pagestore_pid": cluster.store().pid}
        )
    assert reported["checked"]
