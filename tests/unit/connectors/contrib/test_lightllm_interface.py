"""Our stand-ins take what lightllm gives its own classes: compared with the recorded interface of a named version."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

from kvpool.connectors.contrib.lightllm.client import CacheLock, CpuKvCacheClient, PoolCacheWorker
from kvpool.connectors.contrib.lightllm.settings import CacheMeta, keyspace_spec, settings_of_server
from kvpool.core.errors import GeometryUnsupported
from kvpool.core.keyspace import Codec
from tests.fixtures import lightllm_caches

RECORDED = json.loads((Path(__file__).resolve().parents[3] / "fixtures/interfaces/lightllm.json").read_text())


@pytest.mark.parametrize(
    ("name", "ours"), [("CpuKvCacheClient", CpuKvCacheClient), ("DiskCacheWorker", PoolCacheWorker)]
)
def test_calls_have_the_recorded_parameters(name: str, ours: type) -> None:
    for call, wanted in RECORDED[name]["calls"].items():
        given = list(inspect.signature(getattr(ours, call)).parameters)[1:]
        assert given[: len(wanted)] == wanted, call
        extra = list(inspect.signature(getattr(ours, call)).parameters.values())[1 + len(wanted) :]
        assert all(one.default is not inspect.Parameter.empty for one in extra), call


def test_the_lock_and_the_hash_have_the_recorded_names() -> None:
    assert all(callable(getattr(CacheLock(), name)) for name in RECORDED["CpuKvCacheClient"]["lock"])
    hashing = inspect.signature(CpuKvCacheClient.compute_token_list_hash)
    assert list(hashing.parameters)[1:] == RECORDED["compute_token_list_hash"]
    assert set(CacheMeta.__annotations__) == set(RECORDED["CpuKVCacheMeta"])


def test_keyspaces_of_lightllms_caches() -> None:
    plain = keyspace_spec(lightllm_caches.CacheMeta(), "m", "r")
    assert (plain.group.kv_heads, plain.group.head_dim, plain.salt) == (8, 64, b"")  # shared with other engines
    assert keyspace_spec(lightllm_caches.MLA, "m", "r").group.latent_dim == 576
    quantized = keyspace_spec(lightllm_caches.INT8, "m", "r")
    assert quantized.codec is Codec.INT8_GROUP8 and quantized.salt


@pytest.mark.parametrize(
    "meta",
    [
        lightllm_caches.CacheMeta(token_page_size=1, layer_num=1, num_heads=1, head_dim=4096, data_type=torch.uint8),
        lightllm_caches.CacheMeta(data_type=torch.float8_e4m3fn),
        lightllm_caches.CacheMeta(data_type=torch.int8, scale_head_dim=4),
    ],
)
def test_caches_that_are_not_served_are_named(meta: CacheMeta) -> None:
    with pytest.raises(GeometryUnsupported, match="not served"):
        keyspace_spec(meta, "m", "r")


def test_without_lightllm_its_settings_cannot_be_asked_for() -> None:
    with pytest.raises(ModuleNotFoundError, match="lightllm"):
        settings_of_server({})
