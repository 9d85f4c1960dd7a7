"""The prod overlay with a Redis of Sentinels, TLS on every link, and engines under load. One story, in order."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from kvpool.testing.waiting import eventually_sync
from tests.fixtures.certificates import Authority
from tests.kubernetes.issued import CERTIFICATE_DAYS, NAMESPACE, PASSWORD, certificates, secrets
from tests.kubernetes.kube import HERE, Kube
from tests.kubernetes.story import Story, under_load

pytestmark = pytest.mark.timeout(2400)

INDEX, PAGESTORE = "app.kubernetes.io/name=kvpool-index", "app.kubernetes.io/name=kvpool-pagestore"
DEADLINE_S = 300.0
RENEWED_DAYS = CERTIFICATE_DAYS + 10
TLS = ("--tls-ca-file", "/run/kvpool/tls/ca.crt")
MUTUAL = (*TLS, "--tls-cert-file", "/run/kvpool/tls/tls.crt", "--tls-key-file", "/run/kvpool/tls/tls.key")
NAMED = (*MUTUAL, "--tls-server-name", "kvpool")  # agents announce IPs, which no certificate has
ONE_PAGESTORE = "kvpool-pagestore-0.kvpool-pagestore.kvpool.svc:7200"
STATUS = ("kvpool", "cluster", "status", "--index", "kvpool-index.kvpool.svc:7100")


@dataclass(frozen=True, slots=True)
class Prod:
    """What the tests go on with."""

    kube: Kube
    authority: Authority
    directory: Path
    story: Story

    def command(self, *words: str) -> str:
        """Output of a command where an agent is."""
        return self.kube.execute(NAMESPACE, "deploy/vllm", "gpuagent", *words)

    def metric(self, pod: str, container: str, name: str) -> float:
        """A sample of a pod, by the image's own Python."""
        script = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
        text = self.kube.execute(NAMESPACE, pod, container, "python", "-c", script)
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    def pagestores(self) -> dict[str, str]:
        """Lines of `kvpool cluster status` by endpoint."""
        lines = [line for line in self.command(*STATUS, *NAMED).splitlines() if " pagestore " in line]
        return {match[0]: line for line in lines if (match := re.search(r"kvpool-pagestore-\d+", line))}


@pytest.fixture(scope="module")
def prod(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prod]:
    """Up, warm and under load."""
    directory, authority = tmp_path_factory.mktemp("certificates"), Authority("kvpool-ca", days=300)
    kube.apply_documents(secrets(authority, directory))
    kube.apply(HERE / "redis-sentinel")
    kube.wait(NAMESPACE, "statefulset/redis", "statefulset/redis-sentinel")
    kube.apply(HERE / "prod")
    kube.wait(NAMESPACE, "deployment/kvpool-index", "statefulset/kvpool-pagestore")
    kube.apply(HERE / "engine")
    kube.wait(NAMESPACE, "deployment/vllm")
    with under_load(kube, NAMESPACE, directory / "requests.jsonl") as story:
        yield Prod(kube, authority, directory, story)


def test_it_is_complete(prod: Prod) -> None:
    """Three replicas by the autoscaler's minimum, three pagestores, and files that the group alone may read."""

    def ready() -> bool:
        return bool(prod.kube.get(NAMESPACE, "deployment/kvpool-index")["status"].get("readyReplicas") == 3)

    eventually_sync(ready, DEADLINE_S, "not three replicas of the index")
    assert len(prod.pagestores()) == 3
    for where, container in (("deploy/kvpool-index", "index"), ("kvpool-pagestore-0", "pagestore")):
        said = prod.kube.execute(NAMESPACE, where, container, "stat", "-Lc", "%a %u %g", "/run/kvpool/tls/tls.key")
        assert said.split() == ["440", "0", "10001"]
        assert prod.kube.execute(NAMESPACE, where, container, "id", "-u").strip() == "10001"


def test_strangers_are_refused(prod: Prod) -> None:
    """Plain, without a certificate, and with one of another authority; on every port of TLS."""
    other = Authority("somebody else").issue(prod.directory / "other", names=["kvpool"])
    script = "import sys; from pathlib import Path; Path(sys.argv[1]).write_text(sys.argv[2])"
    files = {"ca": prod.directory / "kvpool-gpuagent-tls" / "ca.crt", "crt": other.cert_file, "key": other.key_file}
    for name, path in files.items():
        assert path is not None
        prod.command("python", "-c", script, f"/tmp/other.{name}", path.read_text())
    strange = (
        "--tls-ca-file",
        "/tmp/other.ca",
        "--tls-cert-file",
        "/tmp/other.crt",
        "--tls-key-file",
        "/tmp/other.key",
    )
    for flags in ((), TLS, strange):
        with pytest.raises(AssertionError) as refused:
            prod.command(*STATUS, *flags)
        print(flags[-1:], str(refused.value)[-300:])
        with pytest.raises(AssertionError):
            prod.command("kvpool", "cache", "flush", "--timeout", "5s", "--node", ONE_PAGESTORE, *flags)
    assert "3 pagestores" in prod.command(*STATUS, *NAMED)


@pytest.mark.parametrize("workload", ["deployment/kvpool-index", "statefulset/kvpool-pagestore", "deployment/vllm"])
def test_a_rolling_restart_is_not_noticed(prod: Prod, workload: str) -> None:
    prod.story.go_through(f"prod: rolling restart of {workload}", lambda: prod.kube.restart(NAMESPACE, workload))


def test_a_failover_of_redis_is_not_noticed(prod: Prod) -> None:
    def master() -> str:
        return prod.kube.execute(
            NAMESPACE,
            "redis-sentinel-0",
            "sentinel",
            *("redis-cli", "--tls", "--cert", "/tls/tls.crt", "--key", "/tls/tls.key", "--cacert", "/tls/ca.crt"),
            *("--no-auth-warning", "-a", PASSWORD, "-p", "26379", "sentinel", "get-master-addr-by-name", "kvpool"),
        ).split(".")[0]

    was = master()

    def fail_over() -> float:
        started_s = time.monotonic()
        prod.kube.run("-n", NAMESPACE, "delete", "pod", was, "--grace-period=0", "--force")
        eventually_sync(lambda: master() != was, DEADLINE_S, "no other master")
        taken_s = time.monotonic() - started_s
        prod.kube.wait(NAMESPACE, "statefulset/redis")
        return taken_s

    prod.story.go_through("prod: the master of Redis is killed, Sentinels name another", fail_over)


def test_certificates_are_renewed_without_a_restart(prod: Prod) -> None:
    pods = {
        **dict.fromkeys(prod.kube.pods(NAMESPACE, INDEX), ("index", "kvpool_index")),
        **dict.fromkeys(prod.kube.pods(NAMESPACE, PAGESTORE), ("pagestore", "kvpool_pagestore")),
        **dict.fromkeys(prod.kube.pods(NAMESPACE, "app.kubernetes.io/name=vllm"), ("gpuagent", "kvpool_gpuagent")),
    }
    before = restarts(prod)

    def is_renewed(pod: str) -> bool:
        container, prefix = pods[pod]
        name = f'{prefix}_certificate_expiry_timestamp_seconds{{certificate="own"}}'
        return (prod.metric(pod, container, name) - time.time()) / 86400 > CERTIFICATE_DAYS + 1

    def renew() -> float:
        started_s = time.monotonic()
        prod.kube.apply_documents(certificates(prod.authority, prod.directory, RENEWED_DAYS))
        for pod in pods:
            eventually_sync(partial(is_renewed, pod), DEADLINE_S, f"{pod} has the old one")
        return time.monotonic() - started_s

    prod.story.go_through("prod: all certificates are renewed", renew)
    assert restarts(prod) == before


def restarts(prod: Prod) -> dict[str, int]:
    """Of all containers."""
    found: dict[str, int] = {}
    for pod in prod.kube.get(NAMESPACE, "pods")["items"]:
        for status in pod["status"].get("containerStatuses", []):
            found[f"{pod['metadata']['uid']}/{status['name']}"] = status["restartCount"]
    return found


def test_one_pagestore_at_a_time_may_be_evicted_and_it_leaves_well(prod: Prod) -> None:
    """Its disk tier has everything, its lease ends at once, and it comes back with its pages."""

    def uid() -> str:
        pods = prod.kube.pods(NAMESPACE, PAGESTORE)
        return str(pods["kvpool-pagestore-0"]["metadata"]["uid"]) if "kvpool-pagestore-0" in pods else ""

    was = uid()

    def evict() -> float:
        started_s = time.monotonic()
        assert prod.kube.evict(NAMESPACE, "kvpool-pagestore-0") == ""
        assert "disruption budget" in prod.kube.evict(NAMESPACE, "kvpool-pagestore-1")
        eventually_sync(lambda: uid() not in ("", was), DEADLINE_S, "the evicted pod does not come back")
        prod.kube.wait(NAMESPACE, "statefulset/kvpool-pagestore")
        return time.monotonic() - started_s

    prod.story.go_through("prod: a pagestore is evicted", evict)
    assert re.search(r"[1-9]\d* on disk", prod.pagestores()["kvpool-pagestore-0"])
