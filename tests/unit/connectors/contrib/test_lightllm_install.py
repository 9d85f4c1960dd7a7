"""The stand-ins come into place as lightllm's modules are imported, in whatever way they are imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.connectors.contrib.lightllm import install as lightllm_install
from kvpool.connectors.contrib.lightllm.client import CpuKvCacheClient, PoolCacheWorker
from kvpool.core.errors import InvalidRequest

FILES = {
    "server/multi_level_kv_cache/cpu_cache_client.py": "class CpuKvCacheClient: ...\nclass _CpuPageStatus: ...\n",
    "server/multi_level_kv_cache/disk_cache_worker.py": "raise ImportError('a library is missing')\n",
    "utils/kv_cache_utils.py": "def compute_token_list_hash(tokens, size): return [1]\ndef other(): return 2\n",
    "server/req.py": "from lightllm.utils.kv_cache_utils import compute_token_list_hash, other\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A lightllm of the same shape, and an import system as it was afterwards."""
    for name, text in FILES.items():
        path = tmp_path / "lightllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for directory in ("", "server", "server/multi_level_kv_cache", "utils"):
        (tmp_path / "lightllm" / directory / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "lightllm"]:
        del sys.modules[name]


def test_a_later_lightllm_with_another_interface_is_refused(package: None, tmp_path: Path) -> None:
    own = tmp_path / "lightllm/server/multi_level_kv_cache/cpu_cache_client.py"
    own.write_text(own.read_text() + "class CpuPageAllocState: ...\n")
    lightllm_install.install_when_imported()
    with pytest.raises(InvalidRequest, match="CpuPageAllocState"):
        importlib.import_module("lightllm.server.multi_level_kv_cache.cpu_cache_client")


def test_the_classes_are_changed_and_the_rest_stays(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lightllm_install.install_when_imported()
    lightllm_install.install_when_imported()
    assert sum(isinstance(finder, lightllm_install._Finder) for finder in sys.meta_path) == 1
    client: Any = importlib.import_module("lightllm.server.multi_level_kv_cache.cpu_cache_client")
    worker: Any = importlib.import_module("lightllm.server.multi_level_kv_cache.disk_cache_worker")
    assert client.CpuKvCacheClient is CpuKvCacheClient and client._CpuPageStatus
    assert worker.DiskCacheWorker is PoolCacheWorker
    made: list[tuple[bool, bool]] = []

    class Client:
        def __init__(self, only_create_meta_data: bool, init_shm_data: bool) -> None:
            made.append((only_create_meta_data, init_shm_data))

        def compute_token_list_hash(self, tokens: list[int], page_tokens: int) -> list[int]:
            return [len(tokens), page_tokens]

    monkeypatch.setattr("kvpool.connectors.contrib.lightllm.client.CpuKvCacheClient", Client)
    requests: Any = importlib.import_module("lightllm.server.req")
    assert requests.compute_token_list_hash([1, 2, 3], 64) == [3, 64]
    assert requests.compute_token_list_hash([1], 64) == [1, 64]
    assert requests.other() == 2 and made == [(True, False)]
