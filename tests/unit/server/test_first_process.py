"""What a container starts: stops that come before the service is there, and arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.patience import PATIENCE_S

_ROOTS = [str(Path(__file__).parents[3] / root) for root in ("clients/python", "services/common")]


def start(directory: Path, source: str, *arguments: str) -> subprocess.Popen[str]:
    (directory / "pretended_service.py").write_text(source)
    return subprocess.Popen(
        [sys.executable, "-m", "kvpool_server.first_process", "pretended_service", *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*_ROOTS, str(directory)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_during_imports_ends_it_as_asked(tmp_path: Path, number: signal.Signals) -> None:
    with start(tmp_path, "import sys\nprint('importing', flush=True)\nsys.stdin.read()\n") as child:
        assert child.stdout is not None and child.stdout.readline() == "importing\n"
        child.send_signal(number)
        assert child.wait(timeout=PATIENCE_S) == 0  # by default it would be the negative number of the signal


def test_the_module_runs_as_if_it_had_been_started_itself(tmp_path: Path) -> None:
    source = "import sys\nprint(__name__, sys.argv[1:])\nsys.exit(5)\n"
    with start(tmp_path, source, "--listen", "here") as child:
        output, _ = child.communicate(timeout=PATIENCE_S)
        assert output == "__main__ ['--listen', 'here']\n"
        assert child.returncode == 5
