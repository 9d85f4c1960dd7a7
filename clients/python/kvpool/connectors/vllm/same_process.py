"""Worker sides of engines whose only worker runs in the engine core's process (vLLM's UniProcExecutor).

vLLM delivers `finished_recving` with the output of a step, up to two steps late with asynchronous scheduling: about 15
ms with steps of 7 ms. `KvPoolConnector.update_connector_output` therefore asks the worker side itself, by
`take_arrived`.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool.connectors.vllm.worker import ConnectorWorker

_workers: weakref.WeakValueDictionary[str, ConnectorWorker] = weakref.WeakValueDictionary()


def add_worker(engine_id: str, worker: ConnectorWorker) -> None:
    """Register the only worker of an engine. engine_id: vLLM's, equal for scheduler and worker."""
    _workers[engine_id] = worker


def remove_worker(engine_id: str) -> None:
    """Remove the worker of an engine that has ended, if it has one here."""
    _workers.pop(engine_id, None)


def worker_of(engine_id: str) -> ConnectorWorker | None:
    """Return the engine's worker; None if it runs in another process or is one of several."""
    return _workers.get(engine_id)
