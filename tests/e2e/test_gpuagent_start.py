"""What keeps a gpuagent process from starting: one line on stderr that names it, and exit code 2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

NAME = "kvpool-gpuagent: "


def start(directory: Path, **changes: str) -> subprocess.Popen[str]:
    flags = {
        "data-dir": str(directory / "data"),
        "index-endpoints": "127.0.0.1:1",
        "socket": str(directory / "agent.sock"),
        **{name.replace("_", "-"): value for name, value in changes.items()},
    }
    command = [sys.executable, "-m", "kvpool_gpuagent.main", *(f"--{name}={value}" for name, value in flags.items())]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
    return subprocess.Popen(
        command, env=kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, stderr=subprocess.PIPE, text=True
    )


def test_what_keeps_it_from_starting_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below_file = tmp_path / "file" / "below"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"127.0.0.1:{taken.getsockname()[1]}"
        cases: list[tuple[dict[str, str], list[str]]] = [
            ({"listen": port}, [port, "in use"]),
            ({"metrics_listen": port}, [port, "in use"]),
            ({"data_dir": str(below_file)}, [str(below_file)]),
            ({"data_dir": "/proc/kvpool"}, ["/proc/kvpool"]),
            ({"socket": str(below_file / "agent.sock")}, [str(below_file)]),
            ({"ready_file": str(below_file / "ready")}, [str(below_file)]),
            ({"device": "cuda"}, ["cannot be served"]),
            ({"copy_threads": "0"}, ["copy_threads"]),
            ({"index_endpoints": ""}, ["index_endpoints"]),
        ]
        started = []
        for number, (changes, named) in enumerate(cases):
            directory = tmp_path / str(number)
            directory.mkdir()
            started.append((start(directory, **changes), changes, named))
        for process, changes, named in started:
            _, log = process.communicate(timeout=240)  # all start at once
            assert process.returncode == 2, (changes, log)
            assert "Traceback" not in log, log
            last = log.strip().splitlines()[-1]
            assert last.startswith(NAME) and all(part in last for part in named), (changes, last)
