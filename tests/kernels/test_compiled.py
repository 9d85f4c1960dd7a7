"""The copy kernels compile for the GPU, also where there is none, and move 16 bytes a thread and instruction."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """PTX by kernel."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    script = [sys.executable, "-m", "tests.kernels.compile_kernels"]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(script, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels: dict[str, str] = json.loads(done.stdout)
    return kernels


@pytest.mark.parametrize("kernel", ["gather heads", "gather tokens", "scatter heads", "scatter tokens", "pull"])
def test_rows_move_in_units_of_16_bytes(texts: dict[str, str], kernel: str) -> None:
    accesses = re.findall(r"\b(ld|st)\.global\S*?\.(?:(v[24])\.)?[bu](32|64)\b", texts[kernel])
    stores = [parts for direction, *parts in accesses if direction == "st"]
    wide_loads = [parts for direction, *parts in accesses if direction == "ld" and parts[0]]
    assert stores
    assert {(vector, bits) for vector, bits in stores} <= {("v2", "64"), ("v4", "32")}
    assert len(wide_loads) == len(stores)
