"""The engine of the GPU bench as one that launches kernels for its agent, in a session as any engine has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpool.cli.bench_gpu_plan import described
from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import EnginePlan
from kvpool.client.gpu import ExportedTensors
from kvpool.client.gpu_launch import DEFAULT_SCRATCH_BYTES, GpuLauncher, LaunchRuntime
from kvpool.client.gpuagent import EngineSession
from kvpool.client.sync import BackgroundLoop

_CONNECT_TIMEOUT_S = 20.0
_CLOSE_TIMEOUT_S = 20.0  # of three waits of five seconds


class Lending:
    """A launcher, and the session in which the measured agent asks for launches. Use it from one thread."""

    def __init__(self, *, scratch_bytes: int = DEFAULT_SCRATCH_BYTES, runtime: LaunchRuntime | None = None) -> None:
        """runtime: None: that of the exported tensors' GPU."""
        self._scratch_bytes, self._runtime = scratch_bytes, runtime
        self._loop: BackgroundLoop | None = None
        self._launcher: GpuLauncher | None = None
        self._session: EngineSession | None = None

    def lend(self, exported: ExportedTensors, command: Mapping[str, Any]) -> None:
        """Launch for this cache from now on. Raises KvPoolError if the agent is not at command["socket"] or there is
        no room, KeyError and the like for a command that names no cache."""
        self.close()
        spec, layout = described(command)
        self._launcher = GpuLauncher(exported, spec, layout, scratch_bytes=self._scratch_bytes, runtime=self._runtime)
        plan = EnginePlan(
            endpoint=f"unix:{command['socket']}",
            engine_name="bench",
            keyspace_name="bench",
            spec=spec,
            layout=layout,
            regions=exported.regions,
            launcher=self._launcher,
        )
        config = ClientConfig(connect_timeout_s=_CONNECT_TIMEOUT_S)
        self._loop = self._loop or BackgroundLoop("kvpool-bench")
        try:
            self._session = self._loop.run(
                lambda: EngineSession.open(plan, config, offer=_keep_descriptor), 2 * _CONNECT_TIMEOUT_S
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Free the scratch. The agent must have unmapped it, or be gone. Idempotent."""
        session, self._session = self._session, None
        launcher, self._launcher = self._launcher, None
        try:
            if session is not None and self._loop is not None:
                self._loop.run(session.close, _CLOSE_TIMEOUT_S)
        finally:
            if launcher is not None:
                launcher.close()

    def stop(self) -> None:
        """Close, and end the thread."""
        try:
            self.close()
        finally:
            if self._loop is not None:
                self._loop.stop()


def _keep_descriptor(path: str, token: bytes, number: int, size_bytes: int, fd: int, *, timeout_s: float) -> None:
    """The measured agent wants no hold file: both processes end together."""
