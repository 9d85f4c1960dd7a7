"""The worker's side of engines whose only worker runs in the engine core's process (vLLM's UniProcExecutor).

vLLM delivers `finished_recving` with the output of a step, up to two steps late with asynchronous scheduling: about
15 ms with steps of 7 ms. `KvPoolConnector.update_connector_output` asks the worker's side itself, by `take_arrived`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool.connectors.vllm.worker import WorkerSide

_workers: weakref.WeakValueDictionary[str, WorkerSide] = weakref.WeakValueDictionary()


def add_worker(engine_id: str, worker: WorkerSide) -> None:
    """The only worker of an engine. engine_id: vLLM's, equal for scheduler and worker."""
    _workers[engine_id] = worker


def remove_worker(engine_id: str) -> None:
    """The engine has ended. Does nothing for one that has no worker here."""
    _workers.pop(engine_id, None)


def worker_of(engine_id: str) -> WorkerSide | None:
    """None if it is in another process, or there are several."""
    return _workers.get(engine_id)
