"""The settings of each service: every field has a flag, a variable and a word of help, from its dataclass alone."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_type_hints

import pytest

from kvpool.core.errors import StartupFailed
from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_index.config import IndexConfig
from kvpool_pagestore.config import PageStoreConfig
from kvpool_server.config import SECRET, load_config

SERVICES: list[tuple[type[Any], str]] = [
    (IndexConfig, "KVPOOL_INDEX"),
    (PageStoreConfig, "KVPOOL_PAGESTORE"),
    (GpuAgentConfig, "KVPOOL_GPUAGENT"),
]
REQUIRED = {"data_dir": "/data", "index_endpoints": "index:1", "socket": "/run/agent.sock"}


def required(config: type[Any]) -> dict[str, str]:
    return {
        field.name: REQUIRED[field.name]
        for field in fields(config)
        if field.default is MISSING and field.default_factory is MISSING
    }


def other_value(field: Field[Any], config: Any) -> str:
    """A text that means something else than the field's default."""
    value = getattr(config, field.name)
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int):
        return str(value + 1)
    if isinstance(value, float):
        return str(value + 0.5)
    known = {
        "log_level": "debug",
        "log_format": "json",
        "device": "cuda",
        "write_policy": "selective",
        "tls_client_auth": "none",
    }
    known |= {"staging": "transit", "tenant_quotas": "one=5,*=7"}
    return known.get(field.name, "/other/value:1")


@pytest.mark.parametrize(("config", "prefix"), SERVICES, ids=lambda value: value if isinstance(value, str) else "")
def test_every_setting_has_a_flag_a_variable_and_help(config: type[Any], prefix: str) -> None:
    hints = get_type_hints(config, include_extras=True)
    env = {f"{prefix}_{name.upper()}": value for name, value in required(config).items()}
    plain = load_config(config, prog="test", env_prefix=prefix, argv=[], env=env)
    tried = 0
    for field in fields(config):
        _, *more = get_args(hints[field.name])
        assert any(isinstance(one, str) and one for one in more), f"{config.__name__}.{field.name} has no help"
        value, default = other_value(field, plain), getattr(plain, field.name)
        variable = {f"{prefix}_{field.name.upper()}": value}
        attempts: list[tuple[list[str], dict[str, str]]] = [([], variable)]
        if SECRET not in more:
            name = field.name.replace("_", "-")
            switch = f"--{name}" if value == "true" else f"--no-{name}"
            attempts.append(([switch] if isinstance(default, bool) else [f"--{name}", value], {}))
        for argv, changed in attempts:
            found = load_config(config, prog="test", env_prefix=prefix, argv=argv, env=env | changed)
            assert getattr(found, field.name) != default, f"{config.__name__}.{field.name}: {argv or changed}"
            tried += 1
    assert tried > 30


@pytest.mark.parametrize(
    ("flag", "allowed"), [("--log-level", "debug, info, warning, error"), ("--log-format", "logfmt, json")]
)
@pytest.mark.parametrize(("config", "prefix"), SERVICES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_log_setting_that_does_not_exist_is_refused_with_those_that_do(
    config: type[Any], prefix: str, flag: str, allowed: str
) -> None:
    env = {f"{prefix}_{name.upper()}": value for name, value in required(config).items()}
    with pytest.raises(StartupFailed, match=rf"{flag} \(env .*\) must be one of {allowed}, got 'loud'"):
        load_config(config, prog="test", env_prefix=prefix, argv=[flag, "loud"], env=env)
