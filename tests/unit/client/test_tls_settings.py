"""TLS of engines and commands: by variables, by settings, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpool.client.store_config import StoreConfig
from kvpool.client.tls import TLS_VARIABLES, tls_from_environment
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.core.errors import InvalidRequest
from tests.fixtures.certificates import Authority


def test_nothing_said_is_plain() -> None:
    assert tls_from_environment({}) is None
    assert tls_from_environment(dict.fromkeys(TLS_VARIABLES.values(), "")) is None


def test_settings_come_before_variables(tmp_path: Path) -> None:
    first, second = (Authority().issue(tmp_path / name) for name in ("first", "second"))
    variables = {f"KVPOOL_{name.upper()}": str(path) for name, path in first.named()}
    found = tls_from_environment(variables | {"KVPOOL_TLS_SERVER_NAME": "kvpool"})
    assert found is not None and found.files == first
    assert found.channel_options() == [("grpc.ssl_target_name_override", "kvpool")]
    found = tls_from_environment(variables, {name: str(path) for name, path in second.named()})
    assert found is not None and found.files == second
    assert found.channel_options() == []


def test_the_ca_alone_is_enough(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path / "own")
    found = tls_from_environment({"KVPOOL_TLS_CA_FILE": str(files.ca_file)})
    assert found is not None and found.current().key_pem is None


@pytest.mark.parametrize("name", [name for name in TLS_VARIABLES if name != "tls_ca_file"])
def test_what_has_no_meaning_without_the_ca_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} without tls_ca_file"):
        tls_from_environment({TLS_VARIABLES[name]: "x"})


def test_connectors_follow_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Authority().issue(tmp_path / "own")
    for name, path in files.named():
        monkeypatch.setenv(TLS_VARIABLES[name], str(path))
    configs = (
        VllmSettings(agent="agent:7300").client_config(on_gpu=False),
        StoreConfig(index_endpoints=("index:7100",), pagestore="unix:/run/pagestore.sock").client,
    )
    for config in configs:
        assert config.tls is not None and config.tls.files == files
