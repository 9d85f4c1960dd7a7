"""The block of TLS settings that all services have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvpool.core.errors import StartupFailed
from kvpool_index.config import IndexConfig
from kvpool_server.tls import open_tls
from tests.fixtures.certificates import Authority


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tls_ca_file": None}, "TLS needs all of tls_cert_file, tls_key_file, tls_ca_file; set tls_ca_file"),
        ({"tls_cert_file": None, "tls_key_file": None}, "set tls_cert_file, tls_key_file"),
        ({"tls_cert_file": None, "tls_key_file": None, "tls_ca_file": None, "tls_server_name": "kvpool"}, "needs all"),
        ({"tls_key_file": Path("/nowhere/tls.key")}, "tls_key_file /nowhere/tls.key cannot be read: No such file"),
    ],
)
def test_settings_that_do_not_make_sense_are_refused(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    files = Authority().issue(tmp_path / "own")
    config = IndexConfig(tls_ca_file=files.ca_file, tls_cert_file=files.cert_file, tls_key_file=files.key_file)
    with pytest.raises(StartupFailed, match=named):
        open_tls(replace(config, **changes), CollectorRegistry(), service="index")


def test_without_settings_a_service_is_plain() -> None:
    assert open_tls(IndexConfig(), CollectorRegistry(), service="index") is None
