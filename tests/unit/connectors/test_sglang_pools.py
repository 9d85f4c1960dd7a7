"""Which of SGLang's host pools are served, and that every other one is refused when the server starts."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpool.client.store_values import KeyspaceShards
from kvpool.connectors import sglang
from kvpool.connectors.sglang import HiCacheCalls, _page_numbers
from kvpool.connectors.sglang_pools import Identity, host_pages, page_key_rule
from kvpool.connectors.sglang_side_pools import ALL_PAGES, TRAILING_PAGES, PoolHits, SidePool, restorable_prefixes
from kvpool.core.errors import GeometryUnsupported, InvalidRequest, KeyspaceMismatch
from kvpool.core.keyspace import KeyspaceSpec
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


def test_side_pools_that_are_not_served_are_refused_by_name_and_settings_of_sglang_itself_are_none_of_ours() -> None:
    settings = {"index_endpoints": ["127.0.0.1:1"], "pagestore": "unix:/nobody", "file_storage_path": "/elsewhere"}
    calls = HiCacheCalls(StorageConfig(extra_config={**settings, "model_revision": "1"}))
    try:
        pool = MhaPool("page_first")
        calls.register_mem_pool_host(pool)
        calls.register_mem_host_pool_v2(pool, "kv")
        calls.register_mem_host_pool_v2(MhaPool("page_first"), "swa")
        with pytest.raises(GeometryUnsupported, match="side pool draft is not served"):
            calls.register_mem_host_pool_v2(MhaPool("page_first"), "draft")
    finally:
        calls.close()


class RefusingPages:
    """StorePages over an index that was not there when the server started, and refuses the keyspace now."""

    def __init__(self) -> None:
        self.refusal = KeyspaceMismatch("the name is bound to another geometry", field="layers")
        self.is_reached = False  # the index

    def open(self, space: KeyspaceShards) -> None:
        if self.is_reached:
            raise self.refusal

    def close(self) -> None:
        pass

    def run(self, work: object, count: int) -> list[bool]:
        raise self.refusal


def test_a_keyspace_that_is_refused_after_the_start_is_a_miss_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: Any = RefusingPages()
    monkeypatch.setattr(sglang, "StorePages", lambda *_: pages)
    settings = {"index_endpoints": ["127.0.0.1:1"], "pagestore": "unix:/nobody", "model_revision": "1"}
    calls = HiCacheCalls(StorageConfig(extra_config=settings))
    try:
        calls.register_mem_pool_host(MhaPool("page_first"))
        pages.is_reached = True
        side = SidePool(pages, MhaPool("page_first"), "swa", StorageConfig(), IDENTITY, "rule")
        caplog.clear()
        for _ in range(2):
            assert calls.batch_exists(["a"]) == 0
            assert calls.batch_get_v1(["a"], torch.arange(32)) == [False]
            assert calls.batch_set_v1(["a"], torch.arange(32)) == [False]
            assert side.exists(["a", "b"]) == [False, False]
        assert [record.message.partition(":")[0] for record in caplog.records] == ["kvpool"] * 2
    finally:
        calls.close()


POOLS = st.lists(
    st.builds(
        PoolHits,
        st.sampled_from([ALL_PAGES, TRAILING_PAGES]),
        st.lists(st.booleans(), min_size=12, max_size=12),
        st.integers(0, 4),
    ),
    max_size=3,
)


@given(st.integers(0, 12), POOLS)
def test_a_prefix_is_restorable_where_every_pool_has_what_it_needs(kv_pages: int, pools: list[PoolHits]) -> None:
    wanted = []
    for count in range(1, kv_pages + 1):
        needed = [
            range(count) if pool.policy == ALL_PAGES else range(max(0, count - max(1, pool.trailing)), count)
            for pool in pools
        ]
        if all(pool.present[page] for pool, pages in zip(pools, needed, strict=True) for page in pages):
            wanted.append(count)
    assert restorable_prefixes(kv_pages, pools) == wanted


def old_sglang(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.mem_cache.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    utils = sys.modules["sglang.srt.mem_cache.utils"]
    vars(utils).update(names)
    vars(sys.modules["sglang.srt.mem_cache"])["utils"] = utils
    page_key_rule.cache_clear()


def test_releases_whose_hashes_leave_the_adapter_out_share_with_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        old_sglang(monkeypatch)
        old = host_pages(MhaPool("page_first"), StorageConfig(), IDENTITY).space
        old_sglang(monkeypatch, storage_namespace_seed=object())
        new = host_pages(MhaPool("page_first"), StorageConfig(), IDENTITY).space
    finally:
        page_key_rule.cache_clear()
    assert old.spec != new.spec


def server_with(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    """Have this process be a server of SGLang with these arguments."""
    for name in ("sglang", "sglang.srt", "sglang.srt.runtime_context"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    given = SimpleNamespace(**{"quantization": None, "json_model_override_args": "{}", **arguments})
    vars(sys.modules["sglang.srt.runtime_context"])["get_server_args"] = lambda: given


def spaces(dtype: torch.dtype, **changes: Any) -> tuple[KeyspaceSpec, str]:
    """Of the KV pool, and of a pool with recurrent state, of which `changes` are."""
    pool: Any = MhaPool("page_first", dtype=dtype)
    state: Any = MhaPool("page_first", dtype=dtype)
    vars(state).update({"conv_dtype": torch.bfloat16, "temporal_dtype": torch.bfloat16, **changes})
    side = SidePool(UnusedPages(), state, "mamba", StorageConfig(), IDENTITY, "rule")  # type: ignore[arg-type]
    return host_pages(pool, StorageConfig(), IDENTITY).space.spec, side.space.name


class UnusedPages:
    """StorePages of which nothing is asked."""


def test_kv_of_8_bits_is_shared_by_servers_of_one_type_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kind in ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3"):
        server_with(monkeypatch, kv_cache_dtype=kind)
        found.append(spaces(torch.uint8))
    assert found[0] == found[2]
    assert all(one != other for one, other in zip(found[0], found[1], strict=True))


def test_without_a_server_that_says_its_type_kv_of_8_bits_is_refused() -> None:
    with pytest.raises(GeometryUnsupported, match="8 bits"):
        spaces(torch.uint8)
    spaces(torch.bfloat16)


@pytest.mark.parametrize("arguments", [{"quantization": "fp8"}, {"json_model_override_args": '{"rope_theta": 5}'}])
def test_weights_that_are_changed_at_the_start_are_shared_with_others_of_the_kind(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    server_with(monkeypatch)
    plain = spaces(torch.bfloat16)
    server_with(monkeypatch, **arguments)
    changed = spaces(torch.bfloat16)
    assert all(one != other for one, other in zip(plain, changed, strict=True))


@pytest.mark.parametrize("changes", [{"temporal_dtype": torch.float16}, {"conv_state_shapes": [(3, 24)]}])
def test_states_of_one_size_that_are_arranged_otherwise_are_told_apart(changes: dict[str, Any]) -> None:
    assert spaces(torch.bfloat16)[1] == spaces(torch.bfloat16)[1] != spaces(torch.bfloat16, **changes)[1]
