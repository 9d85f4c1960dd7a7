"""The wrapper that runs an engine and its agent in one container, with small processes in their places."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.patience import PATIENCE_S

WRAPPER = Path(__file__).resolve().parents[3] / "k8s" / "examples" / "vllm-one-container" / "with-agent.sh"
AGENT = """
import os, pathlib, signal, socket, sys
path = pathlib.Path(os.environ["KVPOOL_GPUAGENT_SOCKET"])
path.unlink(missing_ok=True)
server = socket.socket(socket.AF_UNIX)
server.bind(str(path))
starts = path.with_name("starts")
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if path.with_name("broken").exists():
    path.with_name("broken").unlink()
    sys.exit(3)
signal.sigwait({signal.SIGTERM})
print("agent ended", flush=True)
"""
# Blocked at the start, so that a SIGTERM that comes before sigwait is not lost.
BLOCK = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
ENGINE = f"""{BLOCK}
print("engine", flush=True)
signal.sigwait({{signal.SIGTERM}})
print("engine ended", flush=True)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "agent.py").write_text(BLOCK + AGENT)
    return {
        **os.environ,
        "KVPOOL_GPUAGENT_SOCKET": str(tmp_path / "agent.sock"),
        "AGENT_COMMAND": f"{sys.executable} -S {tmp_path / 'agent.py'}",
        "AGENT_PAUSE_S": "0",
    }


def start(environment: dict[str, str], *engine: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(WRAPPER), *engine], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_engine_starts_after_its_agent_and_its_end_ends_both(environment: dict[str, str]) -> None:
    with start(environment, "bash", "-c", 'test -S "$KVPOOL_GPUAGENT_SOCKET" && echo engine ended; exit 7') as wrapper:
        said, _ = wrapper.communicate(timeout=PATIENCE_S)
    assert said.splitlines() == ["engine ended", "agent ended"]
    assert wrapper.returncode == 7


def test_an_engine_that_cannot_be_started_is_reported(environment: dict[str, str]) -> None:
    with start(environment, "/nonexistent") as wrapper:
        wrapper.communicate(timeout=PATIENCE_S)
    assert wrapper.returncode == 127


def test_an_agent_that_ends_is_started_again_and_the_engine_goes_on(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "broken").touch()
    engine = f"until [[ $(cat {tmp_path}/starts) == xx ]]; do read -rt 0.05 <> <(:); done; exit 5"
    with start(environment, "bash", "-c", engine) as wrapper:
        said, complaint = wrapper.communicate(timeout=PATIENCE_S)
    assert "started again" in complaint
    assert said.splitlines() == ["agent ended"]
    assert wrapper.returncode == 5


def test_a_stop_ends_the_engine_first(environment: dict[str, str]) -> None:
    with start(environment, sys.executable, "-S", "-c", ENGINE) as wrapper:
        assert wrapper.stdout is not None
        assert wrapper.stdout.readline() == "engine\n"
        wrapper.send_signal(signal.SIGTERM)
        said, _ = wrapper.communicate(timeout=PATIENCE_S)
    assert said.splitlines() == ["engine ended", "agent ended"]
    assert wrapper.returncode == 0
