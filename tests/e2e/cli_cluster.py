"""The `kvpool` command as a user runs it, and an engine that gives the cluster something to hold."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.client.engine_items import LoadResult
from kvpool.client.engine_registration import EngineRegistration
from kvpool.client.shared_memory import SharedMemoryRegion
from kvpool.client.sync import Pool
from kvpool.core.errors import Overloaded, ServiceUnavailable
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.testing import eventually_sync
from kvpool_cli.state import ClusterState, read_state
from tests.e2e import patient_command
from tests.fixtures.layout_presets import contiguous_layout
from tests.fixtures.patience import LEASE_TTL_MS, PATIENCE_S, SERVICES_MS, patient

PATIENT_COMMAND = Path(__file__).with_name("patient_command.py")
PATIENT_SERVICES = {
    "KVPOOL_INDEX_REDIS_TIMEOUT_MS": SERVICES_MS,
    "KVPOOL_PAGESTORE_INDEX_TIMEOUT_MS": SERVICES_MS,
    "KVPOOL_PAGESTORE_HEARTBEAT_INTERVAL_MS": "5000",
    "KVPOOL_GPUAGENT_INDEX_TIMEOUT_MS": SERVICES_MS,
    "KVPOOL_GPUAGENT_HEARTBEAT_INTERVAL_MS": "5000",
}
SMALL = ("--arena-bytes", "64MiB", "--disk-bytes", "256MiB")
KEYSPACE_NAME = "tiny"
CHUNK_TOKENS = 16
SPEC = KeyspaceSpec(
    model_id="tiny", model_revision="1", groups=(KvGroup(2, 2, 16),), dtype=Dtype.BF16, chunk_tokens=CHUNK_TOKENS
)
_LATE = (ServiceUnavailable, Overloaded)  # an agent waits for its pagestore for a second or three: then engines compute
TOKENS = list(range(100, 100 + 4 * CHUNK_TOKENS + 3))  # four full chunks and a rest


class Cluster:
    """One state directory."""

    def __init__(self, state_dir: Path, *, patient_services: bool = True) -> None:
        """patient_services: they tolerate peers that stall for some seconds, as a machine under test does."""
        self.state_dir, self._patient = state_dir, patient_services

    def command(self, *arguments: str) -> list[str]:
        if self._patient and arguments[:2] == ("cluster", "up"):
            arguments = (*arguments, "--lease-ttl", f"{LEASE_TTL_MS}ms")
        return [sys.executable, "-m", "kvpool_cli", "--state-dir", str(self.state_dir), *arguments]

    @property
    def _environment(self) -> dict[str, str]:
        return os.environ | (PATIENT_SERVICES if self._patient else {})

    def run(self, *arguments: str, code: int = 0, text: str | None = None, is_patient: bool = True) -> str:
        """Output of a command that must end with `code`: its stdout, or for a failure the stderr.

        is_patient: it waits for services that are there; else as long as a user's command does.
        One that succeeds, and starts or ends no process, runs in this one: a Python takes longer to start than it runs.
        """
        argv = self.command(*arguments)
        if code == 0 and (arguments[0] == "cache" or arguments[:2] == ("cluster", "status")) and _may_run_here():
            status, said, error = patient_command.run_here(argv[3:], text)
            assert status == 0, f"{arguments}: code {status}\n{said}\n{error}"
            return said
        if is_patient:
            argv[1:3] = [str(PATIENT_COMMAND)]
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, timeout=110, check=False, env=self._environment
        )
        assert done.returncode == code, f"{arguments}: code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stderr

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Begin a command that goes on."""
        return subprocess.Popen(
            self.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
        )

    def json(self, *arguments: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.run(*arguments, "--json"))
        return document

    @property
    def state(self) -> ClusterState:
        state = read_state(self.state_dir)
        assert state is not None
        return state

    def store(self, tokens: list[int]) -> None:
        """Have an engine store the chunks of a prompt."""
        with _Engine(self.state) as engine:
            engine.store(tokens)

    def load(self, tokens: list[int]) -> tuple[LoadResult, bool]:
        """Have another engine load them; its report, and whether the bytes are those that `store` stores."""
        with _Engine(self.state) as engine:
            return engine.load(tokens)

    def match_and_load(self, tokens: list[int]) -> LoadResult:
        """As `load`, by an engine that has asked how much there is."""
        with _Engine(self.state) as engine:
            engine.match(tokens)
            return engine.load(tokens)[0]

    def kill_everything(self) -> None:
        """As a power cut does."""
        state = self.state
        for pid in (state.supervisor_pid, *(process.pid for process in state.processes)):
            os.kill(pid, signal.SIGKILL)


def _may_run_here() -> bool:
    """Commands run an event loop of their own, and replace the streams of the process for a while."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return threading.current_thread() is threading.main_thread()
    return False


class _Engine:
    """One rank with a small contiguous cache."""

    def __init__(self, state: ClusterState) -> None:
        self._block_count = 8
        layout = contiguous_layout(SPEC, range(2), range(2), CHUNK_TOKENS, self._block_count)
        self._region = SharedMemoryRegion(layout.handle_sizes[0])
        plan = EngineRegistration(
            endpoint=f"unix:{state.of_role('agent')[0].endpoints['socket']}",
            engine_name="test",
            keyspace_name=KEYSPACE_NAME,
            spec=SPEC,
            layout=layout,
            regions=(self._region,),
        )
        self._pool = Pool(plan, patient())

    def __enter__(self) -> _Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()
        assert self._region.close()

    def store(self, tokens: list[int]) -> None:
        np.frombuffer(self._region.buffer, dtype=np.uint8)[:] = self._content()
        chain = self._pool.prompt(tokens)

        def is_stored() -> bool:
            handle = self._pool.store(chain, np.arange(chain.chunk_count), first_chunk=0, end_chunk=chain.chunk_count)
            report = handle.result(PATIENCE_S)
            if any(isinstance(error, _LATE) for error in report.failed_chunks.values()):
                return False
            assert report.stored_chunks + report.deduplicated_chunks == chain.chunk_count, report
            return True

        eventually_sync(is_stored)
        # It is announced a little later.
        eventually_sync(lambda: self._pool.match(chain).matched_chunks == chain.chunk_count)

    def match(self, tokens: list[int]) -> None:
        self._pool.match(self._pool.prompt(tokens))

    def load(self, tokens: list[int]) -> tuple[LoadResult, bool]:
        chain = self._pool.prompt(tokens)

        def loaded() -> LoadResult | None:
            report = self._pool.load(
                chain, np.arange(chain.chunk_count), first_chunk=0, end_chunk=chain.chunk_count, timeout_s=PATIENCE_S
            )
            return None if isinstance(report.error, _LATE) else report

        report = eventually_sync(loaded)
        assert report is not None
        shape = (4, self._block_count, -1)
        ours = np.frombuffer(self._region.buffer, dtype=np.uint8).reshape(shape)[:, : chain.chunk_count]
        theirs = self._content().reshape(shape)[:, : chain.chunk_count]
        return report, bool(np.array_equal(ours, theirs))

    def _content(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.random.default_rng(7).integers(0, 256, self._region.size_bytes, dtype=np.uint8)
