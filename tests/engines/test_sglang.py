"""The storage backend under the real SGLang: see sglang_check."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.environments import run_check
from tests.fixtures.direct_cluster import direct_cluster

pytestmark = pytest.mark.e2e


def test_the_backend_serves_sglangs_own_interface(tmp_path: Path) -> None:
    with direct_cluster(tmp_path) as cluster:
        told = run_check("sglang", {"settings": cluster.settings(), "pagestore_pid": cluster.store().pid})
    assert told["checked"]
