"""Services as real processes, each started, killed and started again by a test."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvpool.testing import eventually_sync
from tests.fixtures.patience import LEASE_TTL_MS, PATIENCE_S, SERVICES_MS

_PATIENT = {"kvpool_gpuagent": "tests.e2e.patient_agent"}


class Process:
    """One service process with a data directory of its own."""

    def __init__(self, module: str, directory: Path, *flags: str, variables: Mapping[str, str] | None = None) -> None:
        directory.mkdir()
        self._ready, self._log = directory / "ready.json", directory / "log"
        main = _PATIENT.get(module, f"{module}.main")
        command = [sys.executable, "-m", main, "--ready-file", str(self._ready), *flags]
        self._command = [*command, "--parent-pid", str(os.getpid())]
        self._variables = dict(variables or {})
        self.ready: dict[str, Any] = {}
        self.start()

    def start(self) -> None:
        """Returns when it runs; `wait_ready` when it serves."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
        kept |= self._variables
        self._ready.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=kept, stderr=log, stdout=log)

    def wait_ready(self) -> dict[str, Any]:
        """Its endpoints."""
        eventually_sync(lambda: self._ready.exists() or self._process.poll() is not None)
        assert self._process.poll() is None, self.log()
        self.ready = json.loads(self._ready.read_text())
        return self.ready

    @property
    def pid(self) -> int:
        """Of the current process."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_s: float) -> int:
        """Until it ends by itself; its exit code."""
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self._process.terminate()
        return self._process.wait(PATIENCE_S)

    def log(self) -> str:
        return self._log.read_text()


class ServiceCluster:
    """An index in memory, pagestores and agents; each pagestore is a host of its own. They are patient with each other:
    peers that stall for some seconds are tolerated, except for nodes with a lease that is set short."""

    def __init__(
        self, directory: Path, shm: Path, flags: Mapping[str, Sequence[str]], redis_url: str, lease_ttl_ms: int
    ) -> None:
        self._directory, self._shm, self._flags = directory, shm, flags
        self.index = Process(
            "kvpool_index",
            directory / "index",
            *("--listen", "127.0.0.1:0", "--lease-ttl-ms", str(lease_ttl_ms), "--redis-timeout-ms", SERVICES_MS),
            *flags.get("index", ()),
            variables={"KVPOOL_INDEX_REDIS_URL": redis_url},
        )
        self._processes = [self.index]

    def pagestore(self, name: str, *flags: str) -> Process:
        """A pagestore on host `name`. flags: more, or others, of them."""
        directory = self._directory / f"pagestore-{name}"
        process = Process(
            "kvpool_pagestore",
            directory,
            *("--data-dir", str(directory / "data"), "--index-endpoints", self.index.wait_ready()["endpoint"]),
            *("--listen", "127.0.0.1:0", "--bulk-listen", "127.0.0.1:0", "--host-id", name),
            *("--socket", str(self.socket(f"{name}.store")), "--session-dir", str(self._shm)),
            *("--arena-bytes", str(64 << 20), "--segment-bytes", str(8 << 20), "--disk-bytes", str(256 << 20)),
            *("--heartbeat-interval-ms", "5000", "--quarantine-grace-ms", "50", "--quarantine-poll-ms", "20"),
            *("--index-timeout-ms", SERVICES_MS),
            *self._flags.get("pagestore", ()),
            *flags,
        )
        self._processes.append(process)
        return process

    def agent(self, name: str, *, host: str = "", **options: str) -> Process:
        """An agent; on the host of a pagestore, or on one that has none."""
        directory = self._directory / f"agent-{name}"
        local = ("--pagestore-socket", str(self.socket(f"{host}.store"))) if host else ()
        flags = [part for flag, value in options.items() for part in (f"--{flag.replace('_', '-')}", value)]
        process = Process(
            "kvpool_gpuagent",
            directory,
            *("--data-dir", str(directory / "data"), "--index-endpoints", self.index.wait_ready()["endpoint"]),
            *("--socket", str(self.socket(f"{name}.agent")), "--host-id", host or f"host of {name}", *local),
            *("--heartbeat-interval-ms", "5000", "--index-timeout-ms", SERVICES_MS, *flags),
            *self._flags.get("gpuagent", ()),
        )
        self._processes.append(process)
        return process

    def socket(self, name: str) -> Path:
        return self._shm / name

    def wait_ready(self) -> None:
        for process in self._processes:
            process.wait_ready()

    def kill_all(self) -> None:
        for process in self._processes:
            process.kill()


@contextmanager
def service_cluster(
    tmp_path: Path,
    *,
    flags: Mapping[str, Sequence[str]] | None = None,
    redis_url: str = "",
    lease_ttl_ms: int = LEASE_TTL_MS,
) -> Iterator[ServiceCluster]:
    """Killed with everything it has left in shared memory when the block ends. flags: more of them, by service."""
    shm = Path("/dev/shm") / f"kvpool-test-{os.getpid()}-{tmp_path.name[-20:]}"
    shm.mkdir(mode=0o700)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, shm, ignore_errors=True)
        cluster = ServiceCluster(tmp_path, shm, flags or {}, redis_url, lease_ttl_ms)
        stack.callback(cluster.kill_all)
        yield cluster
