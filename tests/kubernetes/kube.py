"""kubectl, as tests use it. Commands raise AssertionError with what kubectl said."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from kvpool.testing.waiting import eventually_sync
from tests.kubernetes.older_cluster import older

SMOKE_VARIABLE = "KVPOOL_KUBERNETES_SMOKE"
"""Set to run these tests. `keep` leaves everything standing afterwards."""

HERE = Path(__file__).parent
K8S = HERE.parents[1] / "k8s"
NATIVE_SIDECARS = (1, 29)
COMMAND_TIMEOUT_S = 120.0
ROLLOUT_TIMEOUT_S = 600.0
REMOVAL_TIMEOUT_S = 300.0
# There is no pkill in the images. The first process of a PID namespace is killed from a shared one only.
KILL_SCRIPT = """
import os, pathlib, signal, sys
for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
    if sys.argv[1] in path.read_text().split(chr(0)) and int(path.parent.name) != os.getpid():
        os.kill(int(path.parent.name), signal.SIGKILL)
"""


def with_small_cpu_requests(text: str) -> str:
    """Manifests for a machine of two cores."""
    return re.sub(r"(requests:\n\s+cpu:) \S+", r"\1 20m", text)


class Kube:
    """The cluster of the current context."""

    def __init__(self) -> None:
        version = json.loads(self.run("version", "-o", "json"))["serverVersion"]
        self.version: str = version["gitVersion"]
        release = (int(version["major"]), int("".join(filter(str.isdigit, version["minor"]))))
        self.is_older = release < NATIVE_SIDECARS
        self._applied: list[str] = []

    def run(self, *arguments: str, stdin: str = "", timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Output of a kubectl command."""
        done = subprocess.run(
            ["kubectl", *arguments], check=False, input=stdin, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr.strip()[-2000:]}"
        return done.stdout

    def get(self, namespace: str, kind: str, *more: str) -> Any:
        """Resources as documents."""
        return json.loads(self.run("-n", namespace, "get", kind, *more, "-o", "json"))

    def apply(self, directory: Path, namespace: str = "", change: Callable[[str], str] = str) -> None:
        """A kustomization, in words that this cluster understands."""
        text = change(self.run("kustomize", str(directory)))
        if self.is_older:
            manifests = [manifest for manifest in yaml.safe_load_all(text) if manifest]
            changed = older(manifests, lambda note: print(f"older cluster: {note}", file=sys.stderr))
            text = yaml.safe_dump_all(list(changed), sort_keys=False)
        self._applied.append(text)
        where = ("-n", namespace) if namespace else ()
        self.run(*where, "apply", "-f", "-", stdin=text)

    def apply_documents(self, documents: list[dict[str, Any]]) -> None:
        """Resources that no file has."""
        text = yaml.safe_dump_all(documents, sort_keys=False)
        self._applied.append(text)
        self.run("apply", "-f", "-", stdin=text)

    def wait(self, namespace: str, *workloads: str) -> None:
        """Until they are all ready, and of the last revision."""
        for workload in workloads:
            self.run(
                *("-n", namespace, "rollout", "status", workload, f"--timeout={ROLLOUT_TIMEOUT_S:.0f}s"),
                timeout_s=ROLLOUT_TIMEOUT_S + 30,
            )

    def restart(self, namespace: str, workload: str) -> float:
        """Seconds that a rolling restart took."""
        started_s = time.monotonic()
        self.run("-n", namespace, "rollout", "restart", workload)
        self.wait(namespace, workload)
        return time.monotonic() - started_s

    def kill_pod(self, namespace: str, workload: str) -> float:
        """Delete one pod of a workload by force; seconds until all are ready again."""
        started_s = time.monotonic()
        labels = self.get(namespace, workload)["spec"]["selector"]["matchLabels"]
        victim = sorted(self.pods(namespace, ",".join(f"{name}={value}" for name, value in labels.items())))[0]
        self.run("-n", namespace, "delete", "pod", victim, "--grace-period=0", "--force")
        self.wait(namespace, workload)
        return time.monotonic() - started_s

    def kill_process(
        self, namespace: str, workload: str, container: str, word: str, *, restarts_container: bool = True
    ) -> float:
        """Kill -9 of a container's process that has a word in its command; seconds until all are ready again."""
        started_s = time.monotonic()
        labels = self.get(namespace, workload)["spec"]["selector"]["matchLabels"]
        victim = sorted(self.pods(namespace, ",".join(f"{name}={value}" for name, value in labels.items())))[0]
        self.execute(namespace, victim, container, "python", "-c", KILL_SCRIPT, word)

        def started_again() -> bool:
            statuses = self.get(namespace, "pod", victim)["status"]["containerStatuses"]
            (status,) = [status for status in statuses if status["name"] == container]
            return bool(status["restartCount"] and status["ready"])

        if restarts_container:
            eventually_sync(started_again, ROLLOUT_TIMEOUT_S, f"{container} of {victim} is not started again")
        self.wait(namespace, workload)
        return time.monotonic() - started_s

    def evict(self, namespace: str, pod: str) -> str:
        """Ask for an eviction as `kubectl drain` does; empty, or why it was refused."""
        api_version = "policy/v1beta1" if self.is_older else "policy/v1"
        metadata = {"name": pod, "namespace": namespace}
        body = json.dumps({"apiVersion": api_version, "kind": "Eviction", "metadata": metadata})
        try:
            self.run("create", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction", "-f", "-", stdin=body)
        except AssertionError as error:
            return str(error)
        return ""

    def execute(self, namespace: str, where: str, container: str, *command: str) -> str:
        """Output of a command in a container."""
        return self.run("-n", namespace, "exec", where, "-c", container, "--", *command)

    def pods(self, namespace: str, label: str) -> dict[str, dict[str, Any]]:
        """By name, without those that are on their way out."""
        found = self.get(namespace, "pods", "-l", label)["items"]
        return {pod["metadata"]["name"]: pod for pod in found if "deletionTimestamp" not in pod["metadata"]}

    def exit_code(self, namespace: str, label: str, container: str) -> int | None:
        """Of a container that ended, in the only pod with the label; None while it runs."""
        for pod in self.pods(namespace, label).values():
            for status in pod["status"].get("containerStatuses", []):
                if status["name"] == container and "terminated" in status["state"]:
                    code: int = status["state"]["terminated"]["exitCode"]
                    return code
        return None

    def await_exit(self, namespace: str, label: str, container: str, deadline_s: float) -> int:
        """The same, waited for."""

        def ended() -> tuple[int] | None:
            code = self.exit_code(namespace, label, container)
            return None if code is None else (code,)

        found = eventually_sync(ended, deadline_s, f"{container} of {label} has not ended")
        assert found is not None
        return found[0]

    def await_running(self, namespace: str, label: str) -> None:
        """Until the only pod with the label runs."""

        def runs() -> bool:
            return [pod["status"]["phase"] for pod in self.pods(namespace, label).values()] == ["Running"]

        eventually_sync(runs, ROLLOUT_TIMEOUT_S, f"{label} does not run")

    def remove(self) -> None:
        """All that was applied, the last first."""
        if os.environ.get(SMOKE_VARIABLE) == "keep":
            return
        while self._applied:
            self.run(
                *("delete", "--ignore-not-found", "--wait", f"--timeout={REMOVAL_TIMEOUT_S:.0f}s", "-f", "-"),
                stdin=self._applied.pop(),
                timeout_s=REMOVAL_TIMEOUT_S + 30,
            )
