"""Every component is restarted while engines serve: no request fails, and every token is right.

One story, in order. The figures go to the file that KVPOOL_KUBERNETES_RESULT names, if it is set.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.testing.waiting import eventually_sync
from tests.kubernetes.kube import HERE, Kube
from tests.kubernetes.rollout import LoadLog

pytestmark = pytest.mark.timeout(1800)

NAMESPACE = "kvpool-dev"
RESULT_VARIABLE = "KVPOOL_KUBERNETES_RESULT"
LOAD = "app.kubernetes.io/name=kvpool-load"
REQUESTS = 30  # of a span before and after
WINDOW_S = 15.0  # what "the last requests" are
DEADLINE_S = 300.0
WARM_HIT_SHARE = 0.8  # 960 of 1,008 tokens of a prompt can be had

HAPPENINGS: dict[str, Callable[[Kube], float]] = {
    "rolling restart of the index": lambda kube: kube.restart(NAMESPACE, "deployment/kvpool-index"),
    "rolling restart of the pagestores": lambda kube: kube.restart(NAMESPACE, "statefulset/kvpool-pagestore"),
    "rolling restart of engines and agents": lambda kube: kube.restart(NAMESPACE, "deployment/vllm"),
    "restart of Redis, which loses everything": lambda kube: kube.restart(NAMESPACE, "statefulset/kvpool-redis"),
    "an index replica is killed": lambda kube: kube.kill_pod(NAMESPACE, "deployment/kvpool-index"),
    "a pagestore is killed": lambda kube: kube.kill_pod(NAMESPACE, "statefulset/kvpool-pagestore"),
    "an agent is killed beside its engine": lambda kube: kube.kill_process(
        NAMESPACE, "deployment/vllm", "gpuagent", "kvpool_gpuagent.main"
    ),
}


class Story:
    """Requests so far, and what was found of each happening."""

    def __init__(self, kube: Kube, log: LoadLog) -> None:
        self.kube, self.log, self.rows = kube, log, list[dict[str, object]]()

    def await_requests(self, since_s: float) -> None:
        """Until enough were answered since then to speak of a share."""
        eventually_sync(lambda: self.log.seen(since_s, time.time()).requests >= REQUESTS, DEADLINE_S, "no requests")

    def await_warmth(self) -> float:
        """Seconds until the last requests had nearly all of their prompts from the pool."""
        started_s = time.time()

        def warm() -> bool:
            now_s = time.time()
            return self.log.seen(max(started_s - 1, now_s - WINDOW_S), now_s).hit_share > WARM_HIT_SHARE

        eventually_sync(warm, DEADLINE_S, "engines do not share")
        return time.time() - started_s

    def write(self, row: dict[str, object]) -> None:
        """The figures so far, to the file that was asked for."""
        self.rows.append(row)
        path = os.environ.get(RESULT_VARIABLE)
        if path:
            Path(path).write_text(json.dumps({"kubernetes": self.kube.version, "rows": self.rows}, indent=1) + "\n")


@pytest.fixture(scope="module")
def story(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A warm cluster under load."""
    kube.apply(HERE / "dev")
    kube.wait(NAMESPACE, "statefulset/kvpool-redis", "deployment/kvpool-index", "statefulset/kvpool-pagestore")
    kube.apply(HERE / "engine-plain")
    kube.wait(NAMESPACE, "deployment/vllm")
    kube.apply(HERE / "load", NAMESPACE)
    kube.await_running(NAMESPACE, LOAD)
    log = LoadLog(NAMESPACE, tmp_path_factory.mktemp("load") / "requests.jsonl")
    try:
        story = Story(kube, log)
        story.await_requests(0.0)
        story.await_warmth()
        yield story
    finally:
        log.close()


@pytest.mark.parametrize("happening", HAPPENINGS)
def test_nobody_notices(story: Story, happening: str) -> None:
    before_s = time.time()
    story.await_requests(before_s)
    began_s = time.time()
    took_s = HAPPENINGS[happening](story.kube)
    ended_s = time.time()
    warm_again_s = story.await_warmth()
    story.await_requests(ended_s)
    spans = {
        "before": story.log.seen(before_s, began_s),
        "during": story.log.seen(began_s, ended_s),
        "after": story.log.seen(ended_s, time.time()),
    }
    times = {"took_s": round(took_s, 1), "warm_again_after_s": round(warm_again_s, 1)}
    story.write({"what": happening, **times} | {name: span.document() for name, span in spans.items()})
    print(f"\n{happening}: {times}", *(f"{name}: {span}" for name, span in spans.items()), sep="\n  ")
    for span in spans.values():
        assert (span.failed, span.wrong_tokens) == (0, 0)
    assert spans["during"].requests
