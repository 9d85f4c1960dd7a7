"""LMCache keeps its second level in the cluster: an L2 adapter, loaded as a plugin.

    --l2-adapter '{"type": "plugin", "module_path": "kvpool.connectors.lmcache", "class_name": "KvPoolL2Adapter",
      "adapter_params": {"index_endpoints": [...], "pagestore": "unix:/...", "model_revision": "..."}}'

Objects are cut into pages and go to the pagestore's arena and back with one copy each. Whatever fails is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import lru_cache
from typing import Any

from kvpool.client.store_config import StoreConfig, check_names
from kvpool.client.store_pool import AsyncStorePages
from kvpool.client.store_sync import StorePages
from kvpool.connectors.lmcache_objects import ObjectBatch, ObjectNames, layout_of_description, layout_of_object
from kvpool.core.errors import KvPoolError

_log = logging.getLogger(__name__)
CLASS_NAME = "KvPoolL2Adapter"
_TASKS_MAX = 4096  # that have begun and whose results were not fetched; further ones fail at once


def __getattr__(name: str) -> object:
    """The adapter class needs LMCache's own base class, so it is made when it is first asked for."""
    if name == CLASS_NAME:
        return adapter_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@lru_cache(maxsize=1)
def adapter_class() -> type:
    """KvPoolL2Adapter: L2AdapterCalls as an L2AdapterInterface of the LMCache that is installed here."""
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

    def start(self: Any, adapter_params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        L2AdapterInterface.__init__(self)
        L2AdapterCalls.__init__(self, adapter_params, l1_memory_desc)

    return type(
        CLASS_NAME, (L2AdapterCalls, L2AdapterInterface), {"__doc__": L2AdapterCalls.__doc__, "__init__": start}
    )


class L2AdapterCalls:
    """LMCache's second level over a kvpool cluster. Thread-safe; a task's result can be fetched once.

    Locks are of no use here: what a look-up found may be gone when it is loaded, and is a miss then. Pages are evicted
    by the pagestores' own budgets, so this adapter declares no capacity and deletes nothing.
    """

    def __init__(self, adapter_params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """raises: InvalidRequest naming a setting that is missing or wrong."""
        from lmcache.v1.platform import create_event_notifier

        known = {"model_revision", "salt"} | StoreConfig.names()
        check_names(adapter_params, known, "unknown adapter_params {}; known are {}")
        config = StoreConfig.of(adapter_params)
        if "model_revision" not in adapter_params:
            _log.warning("kvpool: no model_revision is set; set one, or other weights of a model are taken for these")
        self._names = ObjectNames(
            str(adapter_params.get("model_revision", "unspecified")), str(adapter_params.get("salt", ""))
        )
        self._pool = StorePages(config, "lmcache")
        self._lock = threading.Lock()
        self._next_id = 0
        self._running = 0
        self._results: dict[str, dict[int, Any]] = {"store": {}, "lookup": {}, "load": {}}
        self._bells = {kind: create_event_notifier() for kind in self._results}
        self._closed = False
        self._said_no_delete = False

    def get_store_event_fd(self) -> int:
        """Readable when a store has ended."""
        return self._bell("store")

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a look-up has ended."""
        return self._bell("lookup")

    def get_load_event_fd(self) -> int:
        """Readable when a load has ended."""
        return self._bell("load")

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Begin to write objects; their memory is read until the task has ended."""
        from lmcache.v1.distributed.internal_api import L2StoreResult

        fresh: list[int] = []

        async def work(pool: AsyncStorePages) -> object:
            batch = ObjectBatch(self._names, keys, [layout_of_object(one) for one in objects], objects)
            stored = await batch.store(pool, fresh)
            return L2StoreResult(all(stored), sum(objects[at].get_size() for at in fresh))

        def notify(result: object) -> None:
            if fresh:
                self._tell("_notify_keys_stored", [keys[at] for at in fresh], [objects[at].get_size() for at in fresh])

        return self._submit("store", work, L2StoreResult(False, 0), notify)

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Results of all stores that have ended since the last call, by task."""
        with self._lock:
            ended, self._results["store"] = self._results["store"], {}
        return ended

    def submit_lookup_and_lock_task(self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Begin to look objects up. Nothing is locked."""

        async def work(pool: AsyncStorePages) -> object:
            layouts = [layout_of_description(group_layout_descs.get(key.object_group_id)) for key in keys]
            return _bitmap(await ObjectBatch(self._names, keys, layouts).find(pool))

        return self._submit("lookup", work, _bitmap([False] * len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """A bitmap of the objects that were found; None while the look-up goes on."""
        return self._fetch("lookup", task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Nothing was locked."""

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Begin to read objects into the memory of `objects`, which is written until the task has ended."""
        loaded: list[bool] = []

        async def work(pool: AsyncStorePages) -> object:
            batch = ObjectBatch(self._names, keys, [layout_of_object(one) for one in objects], objects)
            loaded.extend(await batch.load(pool))
            return _bitmap(loaded)

        def notify(result: object) -> None:
            if any(loaded):
                self._tell("_notify_keys_accessed", [key for key, one in zip(keys, loaded, strict=True) if one])

        return self._submit("load", work, _bitmap([False] * len(keys)), notify)

    def query_load_result(self, task_id: int) -> Any:
        """A bitmap of the objects that were read, verified; None while the load goes on."""
        return self._fetch("load", task_id)

    def delete(self, keys: Sequence[Any]) -> None:
        """Not served, on purpose: said once, never raised.

        LMCache deletes here what one server has not used for long, by what that server alone has seen. The pages belong
        to all servers of the keyspace, and pagestores, which see the uses of all, evict better. `kvpool cache evict` is
        there for people.
        """
        with self._lock:
            said, self._said_no_delete = self._said_no_delete, True
        if keys and not said:
            _log.error(
                "kvpool: LMCache's eviction of this level has no effect: leave `eviction` out of the adapter's JSON, "
                "and bound it by the pagestores' budgets or `kvpool policy set`"
            )

    def report_status(self) -> dict[str, Any]:
        """Whether the pagestore can be reached, and everything counted since the start."""
        counts = self._pool.counts
        counted = {one.name: getattr(counts, one.name) for one in fields(counts)}
        with self._lock:
            running = self._running
        healthy = self._pool.connected or not counts.failed_calls
        return {"is_healthy": healthy, "type": CLASS_NAME, "running_tasks": running, **counted}

    def close(self) -> None:
        """End the session with the cluster; tasks in flight end first, or are cancelled. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._pool.close()
        for bell in self._bells.values():
            bell.close()

    def _bell(self, kind: str) -> int:
        descriptor: int = self._bells[kind].fileno()
        return descriptor

    def _submit(
        self,
        kind: str,
        work: Callable[[AsyncStorePages], Awaitable[object]],
        failed: object,
        notify: Callable[[object], None] = lambda result: None,
    ) -> int:
        """failed: the result if the work cannot be done. notify: called with the result before it can be fetched."""
        with self._lock:
            task_id, self._next_id = self._next_id, self._next_id + 1
            room = self._running + sum(map(len, self._results.values())) < _TASKS_MAX
            self._running += 1

        def ended(task: Future[object]) -> None:
            result = failed
            if not task.cancelled() and (error := task.exception()) is None:
                result = task.result()
                _notify(notify, result)
            elif not task.cancelled() and not isinstance(error, KvPoolError):
                _log.error("kvpool: a %s task failed", kind, exc_info=error)
            self._end(kind, task_id, result)

        if not room:
            _log.warning("kvpool: a %s task is not taken: %d others have not been fetched", kind, _TASKS_MAX)
            self._end(kind, task_id, failed)
            return task_id
        try:
            task = self._pool.start(work)
        except KvPoolError:
            self._end(kind, task_id, failed)
        else:
            task.add_done_callback(ended)
        return task_id

    def _end(self, kind: str, task_id: int, result: object) -> None:
        with self._lock:
            self._running -= 1
            self._results[kind][task_id] = result
            if not self._closed:
                self._bells[kind].notify()

    def _fetch(self, kind: str, task_id: int) -> Any:
        with self._lock:
            return self._results[kind].pop(task_id, None)

    def _tell(self, name: str, *arguments: object) -> None:
        """Of LMCache's base class: its accounting and its listeners."""
        getattr(self, name)(*arguments)


def _notify(notify: Callable[[object], None], result: object) -> None:
    """A listener of LMCache that fails must not keep the task's result from being fetched."""
    try:
        notify(result)
    except Exception:
        _log.exception("kvpool: a listener of LMCache failed")


def _bitmap(flags: Sequence[bool]) -> Any:
    from lmcache.lmcache_native import Bitmap

    made = Bitmap(len(flags))
    for at, flag in enumerate(flags):
        if flag:
            made.set(at)
    return made
