"""All of the dev overlay is restarted, part by part, and killed, under load: nothing fails, every token is right.

One story, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.kubernetes.kube import HERE, Kube
from tests.kubernetes.story import Story, under_load

pytestmark = pytest.mark.timeout(1800)

NAMESPACE = "kvpool-dev"
HAPPENINGS: dict[str, Callable[[Kube], float]] = {
    "rolling restart of the index": lambda kube: kube.restart(NAMESPACE, "deployment/kvpool-index"),
    "rolling restart of the pagestores": lambda kube: kube.restart(NAMESPACE, "statefulset/kvpool-pagestore"),
    "rolling restart of engines and agents": lambda kube: kube.restart(NAMESPACE, "deployment/vllm"),
    "restart of Redis, which loses everything": lambda kube: kube.restart(NAMESPACE, "statefulset/kvpool-redis"),
    "an index replica is removed by force": lambda kube: kube.kill_pod(NAMESPACE, "deployment/kvpool-index"),
    "a pagestore is removed by force": lambda kube: kube.kill_pod(NAMESPACE, "statefulset/kvpool-pagestore"),
    "an agent is killed beside its engine": lambda kube: kube.kill_process(
        NAMESPACE, "deployment/vllm", "gpuagent", "kvpool_gpuagent.main"
    ),
}


@pytest.fixture(scope="module")
def story(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """A warm cluster under load."""
    kube.apply(HERE / "dev")
    kube.wait(NAMESPACE, "statefulset/kvpool-redis", "deployment/kvpool-index", "statefulset/kvpool-pagestore")
    kube.apply(HERE / "engine-plain")
    kube.wait(NAMESPACE, "deployment/vllm")
    with under_load(kube, NAMESPACE, tmp_path_factory.mktemp("load") / "requests.jsonl") as story:
        yield story


@pytest.mark.parametrize("happening", HAPPENINGS)
def test_it_is_not_noticed(story: Story, kube: Kube, happening: str) -> None:
    story.go_through(f"dev: {happening}", lambda: HAPPENINGS[happening](kube))
