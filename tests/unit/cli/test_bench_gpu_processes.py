"""What the GPU bench runs on, and the processes that it talks to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.cli import bench_gpu_about, main
from kvpool.cli.bench_gpu_about import driver_version, mps_state
from kvpool.cli.bench_gpu_processes import CommandRefused, Process, ProcessFailed
from kvpool.core.errors import NotServed, StartupFailed
from kvpool.cuda.driver import Driver
from tests.fixtures.patience import PATIENCE_S


def test_without_a_gpu_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Driver:
        raise NotServed("there is no CUDA driver here (libcuda.so.1); use device cpu")

    monkeypatch.setattr(Driver, "load", refuse)
    assert main.main(["bench", "gpu", "--quick"]) == 2
    assert (
        capsys.readouterr().err == "kvpool: bench gpu wants a CUDA GPU: there is no CUDA driver here (libcuda.so.1)\n"
    )

    class Blind:
        def device_count(self) -> int:
            return 0

    monkeypatch.setattr(Driver, "load", Blind)
    with pytest.raises(StartupFailed, match="none is visible"):
        bench_gpu_about.check_gpu()


def test_versions_are_found_or_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "version"
    monkeypatch.setattr(bench_gpu_about, "_DRIVER_FILE", path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_version() == "unknown"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    assert driver_version() == "580.95.05"


def test_mps_is_seen_by_its_process_or_its_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    (tmp_path / "17").mkdir()
    (tmp_path / "17" / "comm").write_text("python\n")
    assert mps_state(tmp_path) == "not active"
    (tmp_path / "mps").mkdir()
    (tmp_path / "mps" / "control").touch()
    assert mps_state(tmp_path).startswith("perhaps")
    (tmp_path / "17" / "comm").write_text("nvidia-cuda-mps\n")
    assert mps_state(tmp_path) == "active"


ECHO = """
import json, sys, time
print("a library says hello")
for line in sys.stdin:
    command = json.loads(line)
    if command["op"] == "die":
        print("out of memory", file=sys.stderr)
        sys.exit(3)
    if command["op"] == "hang":
        time.sleep(60)
    print(json.dumps({"error": "no", "type": "ValueError"} if command["op"] == "no" else command), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    (tmp_path / "bench_echo.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *(path for path in sys.path if path)]))
    process = Process("echo", ["bench_echo"])
    yield process
    process.close()


def test_a_process_answers_refuses_and_dies_with_its_last_words(echo: Process) -> None:
    assert echo.ask({"op": "yes"}) == {"op": "yes"}
    with pytest.raises(CommandRefused, match=r"echo: no \(ValueError\)"):
        echo.ask({"op": "no"})
    with pytest.raises(ProcessFailed, match="exit code 3, last line: out of memory"):
        echo.ask({"op": "die"})
    with pytest.raises(ProcessFailed, match="has ended"):
        echo.ask({"op": "yes"})


def test_a_process_that_hangs_is_ended(echo: Process) -> None:
    assert echo.ask({"op": "yes"}) == {"op": "yes"}
    with pytest.raises(ProcessFailed, match=r"did not answer within 0.1 s"):
        echo.ask({"op": "hang"}, timeout_s=0.1)
    assert echo._process.wait(PATIENCE_S) != 0
