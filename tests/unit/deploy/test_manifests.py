"""Kubernetes manifests: what security asks of every container, and that settings are ones that the services have."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import yaml

from kvpool_server.logs import LogFormat
from kvpool_server.server import LIVENESS
from tests.unit.deploy.manifests import (
    K8S,
    KUBECTL,
    REPOSITORY,
    Container,
    build,
    build_with,
    containers,
    pod_of,
    size_bytes,
    workloads,
)
from tools.prometheus_rule import ALERTS, RESOURCE, render

OVERLAYS = ("overlays/dev", "overlays/prod", "overlays/prod-local-nvme")
EXAMPLES = tuple(f"examples/{path.name}" for path in sorted((K8S / "examples").iterdir()))
EVERYTHING = (*OVERLAYS, *EXAMPLES)
WITH_TLS = tuple(path for path in EVERYTHING if path not in ("overlays/dev", "examples/demo"))
# Directories of the host, and who may have them. Nothing else of the host is anybody's.
HOST_PATHS = {
    "overlays/prod-local-nvme": {"/mnt/kvpool", "/run/kvpool/sessions", "/run/kvpool/pagestore"},
    "examples/vllm-sidecar-local": {"/run/kvpool/pagestore"},
}
FINISHES = {"Job/kvpool-demo/demo"}  # nothing to probe

pytestmark = pytest.mark.skipif(KUBECTL is None, reason="needs kubectl, whose kustomize builds the manifests")


def of_ours(path: str) -> list[Container]:
    return [container for container in containers(build(path)) if container.prefix]


@pytest.mark.parametrize("path", EVERYTHING)
@pytest.mark.slow
def test_every_container_is_confined(path: str) -> None:
    found = containers(build(path))
    assert found
    for container in found:
        pod, own = container.pod["securityContext"], container.spec["securityContext"]
        assert {**pod, **own}["runAsNonRoot"] is True, container.name
        assert {**pod, **own}["runAsUser"] > 0, container.name
        assert {**pod, **own}["seccompProfile"] == {"type": "RuntimeDefault"}, container.name
        assert own["capabilities"] == {"drop": ["ALL"]}, container.name
        assert own["allowPrivilegeEscalation"] is False, container.name
        assert own["readOnlyRootFilesystem"] is True, container.name
        assert "privileged" not in own, container.name
        resources = container.spec["resources"]
        assert resources["limits"].get("memory"), container.name
        assert set(resources["requests"]) >= {"cpu", "memory"}, container.name
        image, _, tag = container.spec["image"].rpartition(":")
        assert image, f"{container.name} has no tag"
        assert tag != "latest", container.name


@pytest.mark.parametrize("path", EVERYTHING)
def test_no_pod_has_more_of_its_host_or_of_the_api_than_it_needs(path: str) -> None:
    for workload in workloads(build(path)):
        pod = pod_of(workload)
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        volumes = pod.get("volumes", [])
        assert {v["hostPath"]["path"] for v in volumes if "hostPath" in v} <= HOST_PATHS.get(path, set())
        assert {v["hostPath"]["type"] for v in volumes if "hostPath" in v} <= {"Directory"}
        for volume in volumes:
            assert "emptyDir" not in volume or volume["emptyDir"].get("sizeLimit"), volume
        for volume in volumes:
            assert "secret" not in volume or volume["secret"]["defaultMode"] == 0o440, volume


def test_nodes_are_prepared_by_root_with_one_capability_and_nothing_else_is() -> None:
    plain = {container.name for container in containers(build("overlays/prod-local-nvme"))}
    added = [c for c in containers(build_with("overlays/prod-local-nvme", "prepare-nodes")) if c.name not in plain]
    assert [container.spec["name"] for container in added] == ["prepare-node"]
    assert added[0].spec["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "runAsNonRoot": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
    }
    types = {v["name"]: v["hostPath"]["type"] for v in added[0].pod["volumes"] if "hostPath" in v}
    assert types == {"data": "Directory", "sessions": "DirectoryOrCreate", "sockets": "DirectoryOrCreate"}


@pytest.mark.parametrize("path", EVERYTHING)
def test_variables_are_settings_that_the_service_reads(path: str) -> None:
    for container in of_ours(path):
        config = container.config()
        known = {f"{container.prefix}_{field.name}".upper() for field in dataclasses.fields(config)}
        own = {name for name in container.environment if name.startswith("KVPOOL_")}
        assert own <= known, container.name
        assert config.log_format is LogFormat.JSON or path == "examples/demo"


@pytest.mark.parametrize("path", EVERYTHING)
def test_ports_and_probes_are_those_of_the_configuration(path: str) -> None:
    for container in of_ours(path):
        config = container.config()
        listen = {
            ("grpc", "kvpool-grpc", "grpc-0", "grpc-1"): config.listen,
            ("kvpool-metrics", "metrics-0", "metrics-1"): config.metrics_listen,
        }
        if config.health_listen:
            listen[("health", "kvpool-health")] = config.health_listen
        if container.prefix == "KVPOOL_PAGESTORE":
            listen[("grpc-bulk",)] = config.bulk_listen
        for names, address in listen.items():
            host, _, port = address.rpartition(":")
            assert (host, container.port(*names)) == ("0.0.0.0", int(port)), (container.name, names)
        probed = int((config.health_listen or config.listen).rpartition(":")[2])
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if "grpc" in (probe := container.spec.get(kind, {})):
                expected = {"port": probed, "service": LIVENESS} if kind == "livenessProbe" else {"port": probed}
                assert probe["grpc"] == expected, (container.name, kind)


@pytest.mark.parametrize("path", EVERYTHING)
def test_every_container_is_probed(path: str) -> None:
    for container in containers(build(path)):
        if container.name not in FINISHES:
            assert {"startupProbe", "livenessProbe"} <= set(container.spec), container.name
            assert "readinessProbe" in container.spec or container.is_sidecar, container.name


@pytest.mark.parametrize("path", OVERLAYS)
def test_memory_disk_and_time_are_enough(path: str) -> None:
    for container in of_ours(path):
        config, pod = container.config(), container.pod
        grace_s, pre_stop = (
            pod["terminationGracePeriodSeconds"],
            container.spec["lifecycle"]["preStop"]["exec"]["command"],
        )
        drain_s = config.drain_ms / 1e3 if container.prefix == "KVPOOL_PAGESTORE" else config.drain_s
        assert grace_s >= float(pre_stop[-1].removesuffix("s")) + drain_s + 10
        if container.prefix != "KVPOOL_PAGESTORE":
            continue
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"] for mount in container.spec["volumeMounts"]}
        assert {str(config.data_dir), str(config.session_dir), str(config.socket.parent)} <= mounts
        assert size_bytes(container.spec["resources"]["limits"]["memory"]) >= config.arena_bytes + (1 << 30)
        if "emptyDir" in volumes["sessions"]:
            assert volumes["sessions"]["emptyDir"]["medium"] == "Memory"
        for claim in container.workload["spec"].get("volumeClaimTemplates", []):
            assert size_bytes(claim["spec"]["resources"]["requests"]["storage"]) >= config.disk_bytes * 1.1
        assert pre_stop[:5] == ["kvpool", "cache", "flush", "--node", f"unix:{config.socket}"]


@pytest.mark.parametrize("path", EVERYTHING)
def test_names_lead_somewhere(path: str) -> None:
    """Selectors, ports of Services, volumes and Secrets; a misspelt one is accepted by every API server."""
    manifests = build(path)
    pods = [workload["spec"]["template"]["metadata"]["labels"] for workload in workloads(manifests)]
    ports = {port["name"] for container in containers(manifests) for port in container.spec.get("ports", [])}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        selector = spec.get("selector", spec.get("podSelector", {}))
        selector = selector.get("matchLabels", selector)
        if manifest["kind"] in (
            "Service",
            "PodDisruptionBudget",
            "NetworkPolicy",
            "Deployment",
            "StatefulSet",
            "DaemonSet",
        ):
            assert any(selector.items() <= labels.items() for labels in pods), manifest["metadata"]["name"]
        if manifest["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        if manifest["kind"] == "NetworkPolicy":
            named = {p["port"] for rule in (*spec["ingress"], *spec["egress"]) for p in rule["ports"]}
            assert {port for port in named if isinstance(port, str)} <= ports
    for container in containers(manifests):
        volumes = {volume["name"] for volume in container.pod.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in container.workload["spec"].get("volumeClaimTemplates", [])}
        assert {mount["name"] for mount in container.spec["volumeMounts"]} <= volumes, container.name


@pytest.mark.parametrize("path", EVERYTHING)
def test_secrets_to_make_are_in_the_readme(path: str) -> None:
    manifests = build(path)
    made = {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "Secret"}
    named = {
        v["secret"]["secretName"] for w in workloads(manifests) for v in pod_of(w).get("volumes", []) if "secret" in v
    }
    for container in containers(manifests):
        named |= {
            e["valueFrom"]["secretKeyRef"]["name"] for e in container.spec.get("env", []) if "secretKeyRef" in str(e)
        }
    readme = (K8S / "README.md").read_text()
    assert {name for name in named - made if f"`{name}`" not in readme} == set()


@pytest.mark.parametrize("path", WITH_TLS)
def test_every_service_speaks_mutual_tls(path: str) -> None:
    for container in of_ours(path):
        config = container.config()
        mounts = {mount["mountPath"] for mount in container.spec["volumeMounts"]}
        for file in (config.tls_cert_file, config.tls_key_file, config.tls_ca_file):
            assert str(file.parent) in mounts, container.name
        assert config.tls_client_auth.value == "require"


def test_certificates_have_the_names_that_are_called() -> None:
    manifests = build_with("overlays/prod", "cert-manager")
    named = {m["spec"]["secretName"]: m["spec"].get("dnsNames", []) for m in manifests if m["kind"] == "Certificate"}
    (endpoint,) = {
        e for c in containers(manifests) if c.prefix == "KVPOOL_PAGESTORE" for e in c.config().index_endpoints
    }
    assert endpoint.partition(":")[0] in named["kvpool-index-tls"]
    for example in ("examples/vllm-sidecar", "examples/vllm-one-container"):
        for container in of_ours(example):
            assert container.config().index_endpoints[0].partition(":")[0] in named["kvpool-index-tls"]
    assert "*.kvpool-pagestore.kvpool.svc" in named["kvpool-pagestore-tls"]
    assert all("kvpool" in names for secret, names in named.items() if secret != "kvpool-ca")


def test_prod_has_what_a_cluster_that_others_rely_on_needs() -> None:
    manifests = build("overlays/prod")
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    for service in ("kvpool-index", "kvpool-pagestore"):
        assert {("PodDisruptionBudget", service), ("NetworkPolicy", service), ("Service", service)} <= names
    (autoscaler,) = [manifest for manifest in manifests if manifest["kind"] == "HorizontalPodAutoscaler"]
    (index,) = [manifest for manifest in manifests if manifest["kind"] == "Deployment"]
    assert autoscaler["spec"]["minReplicas"] == 3
    assert "replicas" not in index["spec"]  # an apply would set it back
    assert pod_of(index)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    # With one replica a host at most, an update without room for one more would wait for ever.
    assert index["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 1
    assert not any("redis" in name for kind, name in names if kind in ("StatefulSet", "Deployment"))


def test_a_node_has_one_pagestore_also_while_it_is_updated() -> None:
    manifests = build("overlays/prod-local-nvme")
    assert [m["kind"] for m in workloads(manifests)].count("StatefulSet") == 0
    (daemon_set,) = [manifest for manifest in manifests if manifest["kind"] == "DaemonSet"]
    assert daemon_set["spec"]["updateStrategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    for container in of_ours("overlays/prod-local-nvme"):
        if container.prefix == "KVPOOL_PAGESTORE":
            assert container.config().tls_server_name == "kvpool"  # it announces an IP


@pytest.mark.parametrize("path", EVERYTHING)
def test_budgets_allow_evictions(path: str) -> None:
    """A budget over pods of a DaemonSet, or of a Job, allows none for ever: those have no number to count from."""
    manifests = build(path)
    budgets = [manifest["spec"] for manifest in manifests if manifest["kind"] == "PodDisruptionBudget"]
    for workload in workloads(manifests):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        over = [each for each in budgets if each["selector"]["matchLabels"].items() <= labels.items()]
        if workload["kind"] in ("DaemonSet", "Job"):
            assert not over
        for budget in over:
            assert budget["maxUnavailable"] == 1


def test_dashboards_and_alerts_are_all_there() -> None:
    listed = yaml.safe_load((K8S / "dashboards" / "kustomization.yaml").read_text())["configMapGenerator"][0]["files"]
    assert set(listed) == {path.name for path in (K8S / "dashboards").glob("*.json")}
    manifests = build_with("overlays/dev", "monitoring-operator")
    (rule,) = [manifest for manifest in manifests if manifest["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    assert RESOURCE.read_text() == render(ALERTS.read_text())
    prod = build_with("overlays/prod", "monitoring-operator")  # as k8s/README.md does
    assert {"PodMonitor", "PrometheusRule"} <= {manifest["kind"] for manifest in prod}
    (dashboards,) = [m for m in prod if m["metadata"]["name"] == "kvpool-dashboards"]
    assert all(json.loads(text)["uid"] for text in dashboards["data"].values())
    assert len(json.dumps(dashboards)) < 256 << 10  # what an annotation of `kubectl apply` holds


def test_what_is_scraped_has_the_names_of_jobs_that_alerts_ask_for() -> None:
    alerts = (REPOSITORY / "k8s" / "alerts" / "kvpool.rules.yml").read_text()
    asked = set(re.findall(r'job="([^"]+)"', alerts))
    assert asked <= {"kvpool-index", "kvpool-pagestore", "kvpool-gpuagent"}
    (job,) = yaml.safe_load((K8S / "components/monitoring/kvpool.scrape.yml").read_text())["scrape_configs"]
    monitor = yaml.safe_load((K8S / "components/monitoring-operator/pod-monitor.yaml").read_text())
    plain = [c.get("replacement") for c in job["relabel_configs"] if c.get("target_label") == "job"]
    by_operator = [c.get("replacement") for c in monitor["spec"]["podMetricsEndpoints"][0]["relabelings"]]
    assert plain == by_operator[:2] == ["kvpool-gpuagent", "kvpool-$1"]
    for path in EVERYTHING:
        for container in of_ours(path):
            is_agent = container.prefix == "KVPOOL_GPUAGENT"
            assert is_agent == (container.spec["name"] not in ("index", "pagestore")), container.name
