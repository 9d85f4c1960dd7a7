"""A demo's engine that serves beside the composed cluster, seen from outside."""

from __future__ import annotations

import json
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from kvpool.testing.waiting import eventually_sync
from tests.compose.composed import ComposedCluster

SCRIPT = Path(__file__).with_name("serving.py")
START_LIMIT_S = 120.0
END_LIMIT_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt that was served, or not."""

    is_new: bool  # to everybody: nothing of it can come from the cluster
    error: str  # what the engine's caller saw; empty if it got its tokens
    equal: bool = False  # its tokens are those that the model gives without kvpool
    loaded_tokens: int = 0
    ttft_ms: int = 0
    failure: str = ""  # what kvpool could not do; the engine computed instead

    @classmethod
    def of(cls, said: dict[str, Any]) -> Request:
        """From a line of the engine."""
        if "error" in said:
            return cls(is_new=said["new"], error=said["error"])
        tokens = said["tokens"]
        return cls(
            is_new=said["new"],
            error="",
            equal=said["equal"],
            loaded_tokens=tokens["staging"] + tokens["disk"] + tokens["remote"],
            ttft_ms=said["ttft_ms"],
            failure=said["failure"],
        )


@dataclass(slots=True)
class ServingEngine:
    """Starts to serve at once. Used as a context it is ended, whatever happened."""

    cluster: ComposedCluster
    node: int
    requests: list[Request] = field(default_factory=list)
    _name: str = ""
    _serving: threading.Event = field(default_factory=threading.Event)
    _process: subprocess.Popen[str] | None = None
    _readers: list[threading.Thread] = field(default_factory=list)
    _log: list[str] = field(default_factory=list)

    def __enter__(self) -> ServingEngine:
        self._name = f"{self.cluster.project}-engine-{self.node}"
        command = self.cluster.engine_command(self.node, self.cluster.services["demo"]["image"], "--name", self._name)
        first_new = self.node * 10_000  # prompts that are new to one engine are new to the other one too
        with SCRIPT.open("rb") as script:
            self._process = subprocess.Popen(
                [*command, str(first_new)], stdin=script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        # Two pipes: Docker mixes what comes of one by bytes, not by lines.
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_log)]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            subprocess.run(["docker", "kill", self._name], check=False, capture_output=True, timeout=60)
            self._process.wait(END_LIMIT_S)

    def await_serving(self) -> None:
        """Until its model is there and its first request begins."""
        assert self._serving.wait(START_LIMIT_S), f"the engine of node {self.node} does not serve: {self.log()}"

    def await_hit(self, since: int) -> None:
        """Until a prompt came from the cluster that was asked after the first `since` requests."""

        def hit_or_ended() -> bool:
            return self._has_ended() or any(request.loaded_tokens for request in self.requests[since:])

        try:
            eventually_sync(hit_or_ended, START_LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"the engine of node {self.node} does not hit: {self.log()}") from error
        assert not self._has_ended(), f"the engine of node {self.node} ended: {self.log()}"

    def end(self) -> None:
        """Have it end as engines do. Raises AssertionError unless it does so by itself."""
        self.cluster.docker("stop", "--time", "60", self._name)
        assert self._process is not None
        assert self._process.wait(END_LIMIT_S) == 0, self.log()
        for reader in self._readers:
            reader.join(END_LIMIT_S)

    def log(self) -> str:
        """The last that it said beside its requests."""
        return "\n".join(self._log[-20:]) + f"\n{self.requests[-3:]}"

    def _has_ended(self) -> bool:
        assert self._process is not None, "used outside its context"
        return self._process.poll() is not None

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):
                self._log.append(line.rstrip())
            elif "new" in (said := json.loads(line)):
                self.requests.append(Request.of(said))
            elif "serving" in said:
                self._serving.set()
        self._process.stdout.close()

    def _read_log(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line.rstrip())
        self._process.stderr.close()
