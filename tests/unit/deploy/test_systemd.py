"""The systemd units and the settings that docs/quickstart-hosts.md gives them are ones that the services have."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvpool_gpuagent.config import GpuAgentConfig
from kvpool_index.config import IndexConfig
from kvpool_pagestore.config import PageStoreConfig
from kvpool_server.config import load_config

REPOSITORY = Path(__file__).resolve().parents[3]
GUIDE = (REPOSITORY / "docs/quickstart-hosts.md").read_text()
SERVICES: dict[str, tuple[str, type[Any]]] = {
    "kvpool-index.service": ("KVPOOL_INDEX_", IndexConfig),
    "kvpool-pagestore.service": ("KVPOOL_PAGESTORE_", PageStoreConfig),
    "kvpool-agent@.service": ("KVPOOL_GPUAGENT_", GpuAgentConfig),
}


def values_of(unit: str, name: str) -> list[str]:
    return re.findall(rf"^{name}=(.*)$", (REPOSITORY / "deploy/systemd" / unit).read_text(), re.MULTILINE)


@pytest.mark.parametrize("unit", SERVICES)
def test_a_unit_starts_its_service_with_settings_that_it_takes(unit: str) -> None:
    prefix, config = SERVICES[unit]
    (command,) = values_of(unit, "ExecStart")
    python, flag, module = command.split()
    assert (python, flag) == ("/opt/kvpool/bin/python", "-m") and find_spec(module)
    settings = [text.replace("%i", "1") for text in values_of(unit, "Environment")]
    settings += re.findall(rf"{prefix}[A-Z_]+=[^\s\"']*", GUIDE)
    environment = dict(text.split("=", 1) for text in settings if text.startswith(prefix))
    environment = {name: value.replace("$(hostname", "gpu-0") for name, value in environment.items()}
    loaded = load_config(config, prog=module, env_prefix=prefix.rstrip("_"), argv=[], env=environment)
    assert {name.removeprefix(prefix).lower() for name in environment} <= set(config.__dataclass_fields__)
    assert loaded.listen.startswith("0.0.0.0:")


def test_the_paths_of_one_unit_are_those_that_another_one_looks_at() -> None:
    pagestore = dict(text.split("=", 1) for text in values_of("kvpool-pagestore.service", "Environment"))
    agent = dict(text.split("=", 1) for text in values_of("kvpool-agent@.service", "Environment"))
    assert agent["KVPOOL_GPUAGENT_PAGESTORE_SOCKET"] == pagestore["KVPOOL_PAGESTORE_SOCKET"]
    for unit in SERVICES:
        kept = [f"/var/lib/{name}" for name in values_of(unit, "StateDirectory")]
        assert all(any(path.startswith(root) for root in kept) for path in values_of_paths(unit, "/var/lib/"))
    assert f"auto:{Path(agent['KVPOOL_GPUAGENT_SOCKET']).parent}" in GUIDE


def values_of_paths(unit: str, root: str) -> list[str]:
    return [text.split("=", 1)[1] for text in values_of(unit, "Environment") if text.split("=", 1)[1].startswith(root)]
