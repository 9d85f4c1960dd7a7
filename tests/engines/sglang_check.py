"""Runs in SGLang's own environment: its backend factory, configuration, host pools and page hashes over a cluster.

    python tests/engines/sglang_check.py '{"settings": {...}, "pagestore_pid": 1}'

Prints one JSON object: what was checked. Ends with an error at the first thing that is not as it should be.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import torch

# SGLang imports torchvision for multimodal models; its CUDA build finds no operators beside a torch for the CPU.
_operators: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.common import get_allocator_from_storage  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

PAGE_TOKENS, PAGES, LAYERS, HEADS, HEAD_DIM, LATENT = 32, 12, 4, 8, 64, 576
WAIT_S = 30.0


def host_pool(kind: type, layout: str) -> Any:
    """SGLang's own pool on the CPU, made without a device pool: fields as its constructor sets them, its own buffer."""
    pool: Any = object.__new__(kind)
    pool.layout, pool.page_size, pool.page_num, pool.size = layout, PAGE_TOKENS, PAGES, PAGES * PAGE_TOKENS
    pool.layer_num, pool.dtype, pool.device, pool.pin_memory = LAYERS, torch.bfloat16, "cpu", False
    pool.head_num, pool.head_dim, pool.v_head_dim = HEADS, HEAD_DIM, HEAD_DIM
    pool.kv_cache_dim, pool.head_group_num = LATENT, 1
    pool.start_layer, pool.end_layer = 0, LAYERS
    pool._transfer_device = torch.device("cpu")  # noqa: SLF001  # SGLang's; its constructor needs a device pool
    pool.allocator = get_allocator_from_storage("default")
    pool.kv_buffer = pool.init_kv_buffer()
    return pool


def config(settings: dict[str, Any], **changes: Any) -> HiCacheStorageConfig:
    """As SGLang's cache controller makes it."""
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "meta/tiny",
        "extra_config": {
            "backend_name": "kvpool",
            "module_path": "kvpool.connectors.sglang",
            "class_name": "KvPoolHiCache",
            "interface_v1": 1,
            "model_revision": "1",
            **settings,
        },
    }
    return HiCacheStorageConfig(**(values | changes))


def attached(pool: Any, settings: dict[str, Any], **changes: Any) -> HiCacheStorage:
    """By SGLang's own dynamic loading."""
    backend = StorageBackendFactory.create_backend("dynamic", config(settings, **changes), pool)
    assert isinstance(backend, HiCacheStorage)
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    return backend


def slots(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


def page_of(pool: Any, page: int) -> torch.Tensor:
    """Bytes of a page by SGLang's own accessor, as [layer, plane, token, head, element] whatever the layout."""
    flat = pool.get_data_page(page * PAGE_TOKENS)
    mla = isinstance(pool, MLATokenToKVPoolHost)
    planes, heads, dim = (1, 1, LATENT) if mla else (2, HEADS, HEAD_DIM)
    if pool.layout == "page_first":
        rows = flat.view(planes, PAGE_TOKENS, LAYERS, heads, dim).permute(2, 0, 1, 3, 4)
    elif pool.layout == "page_head":
        rows = flat.view(planes, heads, PAGE_TOKENS, LAYERS, dim).permute(3, 0, 2, 1, 4)
    else:
        rows = flat.view(planes, LAYERS, PAGE_TOKENS, heads, dim).permute(1, 0, 2, 3, 4)
    found: torch.Tensor = rows.contiguous().view(torch.uint8)
    return found


def fill(pool: Any) -> None:
    flat = pool.kv_buffer.view(torch.uint8).view(-1)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))


def until_there(backend: HiCacheStorage, keys: list[str], extra: Any = None) -> None:
    ends_s = time.monotonic() + WAIT_S
    while backend.batch_exists(keys, extra) < len(keys):
        assert time.monotonic() < ends_s, "what was stored is not found"


def check_pools(kind: type, layouts: list[str], settings: dict[str, Any], tokens: list[int], **changes: Any) -> None:
    """Pages stored from one layout load into every other, bit by bit, under SGLang's own page hashes."""
    keys = get_storage_hash_str(tokens, None, page_size=PAGE_TOKENS)
    count = len(keys)
    pool = host_pool(kind, layouts[0])
    fill(pool)
    backend = attached(pool, settings, **changes)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, slots(list(range(count)))) == [True] * count
    until_there(backend, keys)
    stats = backend.get_stats()
    assert stats.backup_pgs == [count] and stats.backup_bandwidth[0] > 0 and not stats.prefetch_pgs
    places = list(range(count, 0, -1))
    for layout in layouts:
        other = host_pool(kind, layout)
        reader = attached(other, settings, **changes)
        until_there(reader, keys)
        extra = HiCacheStorageExtraInfo(prefix_keys=None)
        assert reader.batch_get_v1([*keys, "no such page"], slots([*places, 11]), extra) == [True] * count + [False]
        for page, place in enumerate(places):
            assert torch.equal(page_of(other, place), page_of(pool, page)), (layout, page)
        assert reader.get_stats().prefetch_pgs == [count]
        # The older calls with tensors of single pages.
        [got] = reader.batch_get(keys[:1], [other.get_dummy_flat_data_page()])
        other.set_from_flat_data_page(0, got)
        assert torch.equal(page_of(other, 0), page_of(pool, 0)), layout
        assert reader.batch_set(keys[:1], [other.get_data_page(0)])
        reader.close()
    backend.close()


def mamba_pool(temporal: torch.dtype = torch.float32) -> MambaPoolHost:
    """SGLang's own, with recurrent states of 3 layers."""
    states = MambaStateBufferInfo(
        temporal=torch.zeros(3, 4, 8, 16, 5, dtype=temporal), conv=(torch.zeros(3, 4, 24, 3, dtype=torch.bfloat16),)
    )
    return MambaPoolHost(
        states, 3.0, 0, device_capacity=4, pin_memory=False, layout="page_first", allocator_type="default"
    )


def check_side_pools(settings: dict[str, Any], directory: str) -> None:
    """A hybrid model's pools: what is restorable is what SGLang's own file backend says, and states come back."""
    random_of = random.Random(3)
    keys = get_storage_hash_str(list(range(7000, 7000 + 8 * PAGE_TOKENS)), None, page_size=PAGE_TOKENS)
    anchor, window, state = (
        host_pool(MHATokenToKVPoolHost, "page_first"),
        host_pool(MHATokenToKVPoolHost, "page_first"),
        mamba_pool(),
    )
    fill(window)
    for buffer in (state.temporal_buffer, *state.conv_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(5)))
    theirs = HiCacheFile(config({}), directory)
    theirs.register_mem_pool_host(anchor)
    ours = attached(anchor, settings)
    for one in (ours, theirs):
        one.register_mem_host_pool_v2(anchor, PoolName.KV)
        one.register_mem_host_pool_v2(window, PoolName.SWA)
        one.register_mem_host_pool_v2(state, PoolName.MAMBA)
    kept = [PoolTransfer(PoolName.SWA, slots([page]), keys=[keys[page]]) for page in (1, 2, 3, 4, 6)]
    kept += [PoolTransfer(PoolName.MAMBA, torch.tensor([place]), keys=[keys[page]]) for place, page in ((2, 2), (5, 4))]
    assert ours.batch_set_v1(keys[:7], slots(list(range(7)))) == [True] * 7
    for page in range(7):
        assert theirs.set(keys[page], anchor.get_data_page(page * PAGE_TOKENS))
    for transfer in kept:
        assert ours.batch_set_v2([transfer]) == theirs.batch_set_v2([transfer]) == {transfer.name: [True]}
    until_there(ours, keys[:7])

    def hits(backend: HiCacheStorage, count: int, wanted: list[PoolTransfer]) -> tuple[Any, ...]:
        found = backend.batch_exists_v2(keys[:count], wanted)
        return found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages

    ends_s = time.monotonic() + WAIT_S
    last = [PoolTransfer(PoolName.MAMBA, keys=["trailing"], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    while hits(ours, 8, last)[0] < 5:
        assert time.monotonic() < ends_s, "what was stored is not found"
    for _ in range(200):
        wanted = []
        for name in random_of.sample([PoolName.SWA, PoolName.MAMBA], random_of.randint(1, 2)):
            policy, trailing = random_of.choice(list(PoolHitPolicy)[:2]), random_of.randint(1, 3)
            wanted.append(PoolTransfer(name, keys=["trailing"] * trailing, hit_policy=policy))
        count = random_of.randint(1, 8)
        assert hits(ours, count, wanted) == hits(theirs, count, wanted), (count, wanted)
    assert hits(ours, 8, [PoolTransfer(PoolName.DRAFT, keys=["trailing"])])[0] == 0

    reader, other = attached(host_pool(MHATokenToKVPoolHost, "page_first"), settings), mamba_pool()
    reader.register_mem_host_pool_v2(other, PoolName.MAMBA)
    loads = [PoolTransfer(PoolName.MAMBA, torch.tensor([7, 8]), keys=[keys[4], keys[5]])]
    assert reader.batch_get_v2(loads) == {PoolName.MAMBA: [True, False]}
    assert torch.equal(other.get_data_page(7), state.get_data_page(5)) and not other.get_data_page(8).any()
    reader.close()
    ours.close()


def check_types_of_states(settings: dict[str, Any]) -> None:
    """States of one size and two types are two keyspaces, though SGLang gives out the bytes of both without a type."""
    backend: Any = attached(host_pool(MHATokenToKVPoolHost, "page_first"), settings)
    spaces = []
    for dtype in (torch.float16, torch.bfloat16, torch.float16):
        backend.register_mem_host_pool_v2(mamba_pool(dtype), PoolName.MAMBA)
        spaces.append(backend._side_pools["mamba"].space.name)  # noqa: SLF001
    assert spaces[0] == spaces[2] != spaces[1], spaces
    backend.close()


def check_interface() -> None:
    """Every call of the base class that SGLang makes takes the arguments it is given there."""
    from sglang.srt.runtime_context import get_server_args

    from kvpool.connectors.sglang import backend_class

    assert callable(get_server_args)  # without it KV of 8 bits is refused
    ours: Any = backend_class()
    one_pool = ("batch_exists", "batch_get_v1", "batch_set_v1", "get", "batch_get", "set", "batch_set", "exists")
    for name in (*one_pool, "batch_exists_v2", "batch_get_v2", "batch_set_v2", "register_mem_host_pool_v2"):
        wanted = list(inspect.signature(getattr(HiCacheStorage, name)).parameters)
        assert list(inspect.signature(getattr(ours, name)).parameters) == wanted, name
    assert not ours.__abstractmethods__


def check_pagestore_killed(settings: dict[str, Any], pid: int) -> None:
    pool = host_pool(MHATokenToKVPoolHost, "page_first")
    backend = attached(pool, settings)
    keys = get_storage_hash_str(list(range(PAGE_TOKENS)), None, page_size=PAGE_TOKENS)
    until_there(backend, keys)
    os.kill(pid, signal.SIGKILL)
    assert backend.batch_get_v1(keys, slots([0])) == [False]
    assert backend.batch_set_v1(["another"], slots([1])) == [False]
    backend.close()


def main() -> None:
    given = json.loads(sys.argv[1])
    settings = given["settings"]
    check_interface()
    tokens = list(range(6 * PAGE_TOKENS))
    every = ["page_first", "layer_first", "page_first_direct", "page_head"]
    check_pools(MHATokenToKVPoolHost, every, settings, tokens)
    check_pools(MLATokenToKVPoolHost, every[:3], settings, tokens, is_mla_model=True, tp_size=2)
    with tempfile.TemporaryDirectory() as directory:
        check_side_pools(settings, directory)
        check_types_of_states(settings)
    check_pagestore_killed(settings, given["pagestore_pid"])
    print(json.dumps({"sglang": version("sglang"), "torch": torch.__version__, "checked": True}))


if __name__ == "__main__":
    main()
