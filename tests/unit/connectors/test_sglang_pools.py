"""Which of SGLang's host pools are served, and that every other one is refused when the server starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpool.connectors.sglang import HiCacheCalls, _page_numbers
from kvpool.connectors.sglang_pools import Identity, host_pages
from kvpool.core.errors import GeometryUnsupported, InvalidRequest
from tests.fixtures.host_pools import MhaPool, MlaPool, StorageConfig

IDENTITY = Identity(model_id="tiny", model_revision="1")


@pytest.mark.parametrize(
    "slots",
    [
        list(range(32)),  # one page for two keys
        [*range(1, 33), *range(32, 64)],  # not aligned
        [*range(31), 40, *range(32, 64)],  # a token that lies elsewhere
    ],
)
def test_slots_that_are_no_whole_pages_are_refused(slots: list[int]) -> None:
    host = host_pages(MhaPool("page_first"), StorageConfig(), IDENTITY)
    assert _page_numbers(host, ["a", "b"], torch.arange(64, 128)) == [2, 3]
    with pytest.raises(InvalidRequest, match="whole pages"):
        _page_numbers(host, ["a", "b"], torch.tensor(slots))


class ScaledPool(MhaPool):
    """As MHATokenToKVPoolMXFP8Host: rows whose scales are in a buffer of their own."""


def test_a_pool_that_keeps_more_than_its_buffer_is_refused() -> None:
    with pytest.raises(GeometryUnsupported, match="ScaledPool are not served"):
        host_pages(ScaledPool("page_first"), StorageConfig(), IDENTITY)


def test_layers_that_are_split_over_ranks_are_refused() -> None:
    pool: Any = MlaPool("page_first")
    pool.layer_shard_enabled = True
    with pytest.raises(GeometryUnsupported, match="split over ranks"):
        host_pages(pool, StorageConfig(is_mla_model=True), IDENTITY)


def test_side_pools_are_refused_by_name_and_settings_of_sglang_itself_are_none_of_ours() -> None:
    settings = {"index_endpoints": ["127.0.0.1:1"], "pagestore": "unix:/nobody", "file_storage_path": "/elsewhere"}
    calls = HiCacheCalls(StorageConfig(extra_config={**settings, "model_revision": "1"}))
    try:
        pool = MhaPool("page_first")
        calls.register_mem_pool_host(pool)
        calls.register_mem_host_pool_v2(pool, "kv")
        with pytest.raises(GeometryUnsupported, match="side pool mamba"):
            calls.register_mem_host_pool_v2(MhaPool("page_first"), "mamba")
    finally:
        calls.close()
