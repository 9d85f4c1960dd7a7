"""Happenings under load, one after the other, each with what clients saw of it.

The figures go to the file that KVPOOL_KUBERNETES_RESULT names, if it is set; a story adds its rows to those there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpool.testing.waiting import eventually_sync
from tests.kubernetes.kube import HERE, Kube
from tests.kubernetes.rollout import LoadLog

LOAD = "app.kubernetes.io/name=kvpool-load"
RESULT_VARIABLE = "KVPOOL_KUBERNETES_RESULT"
REQUESTS = 30  # of a span before and after
WINDOW_S = 15.0  # what "the last requests" are
WINDOW_REQUESTS = 8
DEADLINE_S = 300.0
WARM_HIT_SHARE = 0.8  # 448 of the 480 tokens of a prompt can be had


class Story:
    """Requests so far, and what was found of each happening."""

    def __init__(self, kube: Kube, log: LoadLog) -> None:
        self._kube, self._log = kube, log

    def tokens_from(self, source: str) -> int:
        """Of all prompts so far."""
        self._log.refresh()
        return sum(one["sources"][source] for one in self._log.requests if "sources" in one)

    def await_requests(self, since_s: float) -> None:
        """Until enough were answered since then to speak of a share."""
        eventually_sync(lambda: self._log.seen(since_s, time.time()).requests >= REQUESTS, DEADLINE_S, "no requests")

    def await_warmth(self) -> float:
        """Seconds until the last requests had nearly all of their prompts from the pool."""
        started_s = time.time()

        def warm() -> bool:
            now_s = time.time()
            last = self._log.seen(max(started_s, now_s - WINDOW_S), now_s)
            return last.requests >= WINDOW_REQUESTS and last.hit_share > WARM_HIT_SHARE

        eventually_sync(warm, DEADLINE_S, "engines do not share")
        return time.time() - started_s

    def go_through(self, what: str, happening: Callable[[], float]) -> None:
        """happening: returns the seconds that it took. Raises AssertionError for a failed request or a wrong token."""
        before_s = time.time()
        self.await_requests(before_s)
        began_s = time.time()
        took_s = happening()
        ended_s = time.time()
        warm_again_s = self.await_warmth()
        self.await_requests(ended_s)
        spans = {
            "before": self._log.seen(before_s, began_s),
            "during": self._log.seen(began_s, ended_s),
            "after": self._log.seen(ended_s, time.time()),
        }
        times = {"took_s": round(took_s, 1), "warm_again_after_s": round(warm_again_s, 1)}
        self._write({"what": what, **times} | {name: span.document() for name, span in spans.items()})
        print(f"\n{what}: {times}", *(f"{name}: {span}" for name, span in spans.items()), sep="\n  ")
        for span in spans.values():
            assert (span.failed, span.wrong_tokens) == (0, 0), self._log.faults(before_s)

    def _write(self, row: dict[str, object]) -> None:
        path = os.environ.get(RESULT_VARIABLE)
        if not path:
            return
        document = json.loads(Path(path).read_text()) if Path(path).exists() else {"rows": []}
        document |= {"kubernetes": self._kube.version, "rows": [*document["rows"], row]}
        Path(path).write_text(json.dumps(document, indent=1) + "\n")


@contextmanager
def under_load(kube: Kube, namespace: str, path: Path, service: str = "vllm") -> Iterator[Story]:
    """Clients on the engines of a Service, which share by then. path: for what the clients write."""
    kube.apply(HERE / "load", namespace, change=lambda text: text.replace("http://vllm:", f"http://{service}:"))
    kube.await_running(namespace, LOAD)
    log = LoadLog(namespace, path)
    try:
        story = Story(kube, log)
        story.await_requests(0.0)
        story.await_warmth()
        yield story
    finally:
        log.close()
        kube.run("-n", namespace, "delete", "job", "kvpool-load", "--wait")
