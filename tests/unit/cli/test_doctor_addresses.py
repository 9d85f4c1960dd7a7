"""What `kvpool doctor` says of addresses that cannot be used, and how it asks Sentinels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis

from kvpool_cli.doctor.finding import Level
from kvpool_cli.doctor.redis_server import examine_redis
from kvpool_cli.main import run_command as main


def test_a_certificate_or_a_url_that_cannot_be_used_does_not_end_the_examination(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = ["--tls-ca-file", str(tmp_path / "none"), "--index", "127.0.0.1:1", "--redis", "redis://[::1"]
    assert main(["--state-dir", str(tmp_path), "doctor", "--json", *strange]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    bad_ones = {one["subject"]: one["message"] for one in findings if one["level"] == "error"}
    assert "cannot be read" in bad_ones["index"] and "cannot be asked" in bad_ones["redis"]
    assert any(one["subject"] == "kernel" for one in findings)


def test_sentinels_are_asked_as_the_index_asks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Sentinels:
        def __init__(self, sentinels: object, *, sentinel_kwargs: dict[str, Any]) -> None:
            asked.update(sentinel_kwargs)

        def discover_master(self, service: str) -> tuple[str, int]:
            raise redis.sentinel.MasterNotFoundError(f"No master found for {service!r} : <Redis<ConnectionPool<...>>>")

    monkeypatch.setattr(redis, "Sentinel", Sentinels)
    query = "ssl_ca_certs=/ca.pem&ssl_check_hostname=false&sentinel_password=secret"
    (found,) = examine_redis(f"rediss+sentinel://:other@s0:26379,s1:26379/kvpool?{query}")
    assert (asked["ssl"], asked["ssl_ca_certs"], asked["ssl_check_hostname"]) == (True, "/ca.pem", False)
    assert asked["password"] == "secret" and asked["username"] is None
    assert found.level is Level.ERROR and "names a master called 'kvpool'" in found.message
    assert not any(hidden in found.message for hidden in ("secret", "other", "ConnectionPool"))
