"""Runs in LMCache's own environment: its plugin loading, keys, memory objects, events and listeners over a cluster.

    python tests/engines/lmcache_check.py '{"settings": {...}, "pagestore_pid": 1}'

Prints one JSON object: what was checked. Ends with an error at the first thing that is not as it should be.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import sys
import time
from importlib.metadata import version
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

SHAPE, DTYPE = torch.Size([2, 4, 256, 512]), torch.bfloat16  # 2 MiB and a bit more than a page
ODD_SHAPE = torch.Size([3, 1000])
WAIT_S = 30.0


class Listener(L2AdapterListener):  # type: ignore[misc]  # untyped where LMCache is not installed
    """Counts what it is given."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.fails = False
        self.accessed: list[Any] = []

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        if self.fails:
            raise ValueError("a listener that fails")
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        raise AssertionError("nothing is deleted")


def memory_object(shape: torch.Size, seed: int | None) -> TensorMemoryObj:
    """Random bits, or zeros without a seed."""
    size_bytes = shape.numel() * DTYPE.itemsize
    raw = torch.zeros(size_bytes, dtype=torch.uint8)
    if seed is not None:
        raw = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    metadata = MemoryObjMetadata(
        shape=shape, dtype=DTYPE, address=0, phy_size=size_bytes, ref_count=1, fmt=MemoryFormat.KV_2LTD
    )
    return TensorMemoryObj(raw_data=raw, metadata=metadata, parent_allocator=None)


def key(number: int, **changes: Any) -> ObjectKey:
    values = {"chunk_hash": hashlib.sha256(str(number).encode()).digest(), "model_name": "meta/tiny", "kv_rank": 7}
    return ObjectKey(**(values | changes))


def until(descriptor: int, ask: Any) -> Any:
    """The result of a task, asked for only after its descriptor became readable."""
    ends_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_s:
        ready, _, _ = select.select([descriptor], [], [], WAIT_S)
        assert ready, "no event came"
        consume_fd(descriptor)
        result = ask()
        if result is not None and result != {}:
            return result
    raise AssertionError("no result came")


class Calls:
    """An adapter as LMCache's controllers use one."""

    def __init__(self, adapter: L2AdapterInterface) -> None:
        self.adapter = adapter

    def store(self, keys: list[ObjectKey], objects: list[Any]) -> Any:
        task = self.adapter.submit_store_task(keys, objects)
        done = until(self.adapter.get_store_event_fd(), self.adapter.pop_completed_store_tasks)
        assert list(done) == [task]
        assert self.adapter.pop_completed_store_tasks() == {}
        return done[task]

    def find(self, keys: list[ObjectKey], *shapes: torch.Size) -> list[bool]:
        """shapes: of the objects of each object group."""
        layouts = {group: MemoryLayoutDesc([shape], [DTYPE]) for group, shape in enumerate(shapes or (SHAPE,))}
        task = self.adapter.submit_lookup_and_lock_task(keys, layouts)
        query = self.adapter.query_lookup_and_lock_result
        bits = until(self.adapter.get_lookup_and_lock_event_fd(), lambda: query(task))
        assert query(task) is None, "a result is fetched once"
        self.adapter.submit_unlock(keys)
        return [bits.test(at) for at in range(len(keys))]

    def find_all(self, keys: list[ObjectKey], *shapes: torch.Size) -> None:
        """What was stored is announced soon."""
        ends_s = time.monotonic() + WAIT_S
        while not all(self.find(keys, *shapes)):
            assert time.monotonic() < ends_s, "what was stored is not found"

    def load(self, keys: list[ObjectKey], objects: list[Any]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        query = self.adapter.query_load_result
        bits = until(self.adapter.get_load_event_fd(), lambda: query(task))
        return [bits.test(at) for at in range(len(keys))]


def opened(settings: dict[str, Any], listener: L2AdapterListener | None = None) -> Calls:
    """By LMCache's own way from its JSON."""
    described = {
        "type": "plugin",
        "module_path": "kvpool.connectors.lmcache",
        "class_name": "KvPoolL2Adapter",
        "adapter_params": {**settings, "model_revision": "1"},
    }
    adapter = create_l2_adapter(PluginL2AdapterConfig.from_dict(described))
    adapter.set_backend_identity("plugin", shared=True)
    if listener is not None:
        adapter.register_listener(listener)
    return Calls(adapter)


def check_objects(calls: Calls, listener: Listener) -> None:
    descriptors = {
        calls.adapter.get_store_event_fd(),
        calls.adapter.get_lookup_and_lock_event_fd(),
        calls.adapter.get_load_event_fd(),
    }
    assert len(descriptors) == 3
    keys = [key(number) for number in range(6)]
    objects = [memory_object(SHAPE, number) for number in range(6)]
    assert calls.find(keys) == [False] * 6
    result = calls.store(keys, objects)
    assert result.is_successful() and result.bytes_transferred() == 6 * objects[0].get_size()
    calls.find_all(keys)
    assert [stored for stored, _ in listener.stored] == keys
    again = calls.store(keys, objects)
    assert again.is_successful() and again.bytes_transferred() == 0 and len(listener.stored) == 6
    assert calls.adapter.get_usage().total_bytes_used == 6 * objects[0].get_size()
    others = [key(0, kv_rank=8), key(0, cache_salt="alice"), key(0, model_name="meta/other")]
    assert calls.find([keys[0], *others, keys[5]]) == [True, False, False, False, True]
    assert calls.find([keys[0]], torch.Size([2, 4, 128, 1024])) == [False], "another layout of as many bytes"
    assert calls.find([key(0, object_group_id=1)]) == [False], "a group without a layout"
    empty = [memory_object(SHAPE, None) for _ in range(7)]
    assert calls.load([*keys, key(99)], empty) == [True] * 6 + [False]
    for one, other in zip(objects, empty, strict=False):
        assert torch.equal(one.raw_data, other.raw_data)
    assert not empty[6].raw_data.any() and listener.accessed == keys
    odd, odd_key = memory_object(ODD_SHAPE, 50), key(50)
    assert calls.store([odd_key], [odd]).is_successful()
    calls.find_all([odd_key], ODD_SHAPE)
    place = memory_object(ODD_SHAPE, None)
    assert calls.load([odd_key], [place]) == [True]
    assert torch.equal(place.raw_data, odd.raw_data)


def check_object_groups(calls: Calls) -> None:
    """With --separate-object-groups a chunk is an object of each group, with a layout of its own."""
    for shapes in ((SHAPE, ODD_SHAPE), (SHAPE, SHAPE)):  # equal layouts must not make them one
        first = 80 if shapes[1] == ODD_SHAPE else 90
        keys = [key(first + chunk, object_group_id=group) for chunk in range(3) for group in range(2)]
        sizes = [shapes[one.object_group_id] for one in keys]
        objects = [memory_object(shape, first + at) for at, shape in enumerate(sizes)]
        assert calls.store(keys[:-1], objects[:-1]).is_successful()
        calls.find_all(keys[:-1], *shapes)
        assert calls.find(keys, *shapes) == [True] * 5 + [False], "the last chunk has no object of group 1"
        places = [memory_object(shape, None) for shape in sizes]
        assert calls.load(keys, places) == [True] * 5 + [False]
        for one, place in zip(objects[:-1], places, strict=False):
            assert torch.equal(one.raw_data, place.raw_data)


def check_refusals(calls: Calls, listener: Listener) -> None:
    """A listener that fails costs no result; deleting and listing are not served, and harm nothing."""
    listener.fails = True
    assert calls.store([key(60)], [memory_object(SHAPE, 60)]).is_successful()
    listener.fails = False
    calls.adapter.delete([key(60)])
    calls.find_all([key(60)])
    try:
        calls.adapter.list_l2_keys()
    except NotImplementedError:
        return
    raise AssertionError("keys were listed")


def check_another_process(settings: dict[str, Any]) -> None:
    """A new adapter, as after a restart of LMCache, finds what the first one stored."""
    calls = opened(settings)
    place = memory_object(SHAPE, None)
    assert calls.find([key(3)]) == [True]
    assert calls.load([key(3)], [place]) == [True]
    assert torch.equal(place.raw_data, memory_object(SHAPE, 3).raw_data)
    assert calls.adapter.report_status()["is_healthy"]
    calls.adapter.close()
    calls.adapter.close()


def check_pagestore_killed(calls: Calls, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    place = memory_object(SHAPE, None)
    assert calls.load([key(1)], [place]) == [False]
    assert not calls.store([key(70)], [memory_object(SHAPE, 70)]).is_successful()
    assert not calls.adapter.report_status()["is_healthy"]


def main() -> None:
    given = json.loads(sys.argv[1])
    listener = Listener()
    calls = opened(given["settings"], listener)
    check_objects(calls, listener)
    check_object_groups(calls)
    check_refusals(calls, listener)
    check_another_process(given["settings"])
    check_pagestore_killed(calls, given["pagestore_pid"])
    calls.adapter.close()
    late = calls.adapter.submit_load_task([key(1)], [memory_object(SHAPE, None)])
    assert not calls.adapter.query_load_result(late).test(0), "a closed adapter misses"
    print(json.dumps({"lmcache": version("lmcache"), "torch": torch.__version__, "checked": True}))


if __name__ == "__main__":
    main()
