"""The agent's GPU path with kernels in Triton's interpreter, on host memory: bad input, faults and races.

Left out where there is a GPU: there kernels are compiled, and compiled ones cannot reach host memory. tests/gpu has the
same cases on real devices.
"""

import os

import pytest
import torch

from tests.fixtures.patience import patient_agents

if torch.cuda.is_available():
    collect_ignore_glob = ["*"]
else:
    # Read when a kernel is defined, so before any module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What agents wait for each other is not what these tests are about, and the machine may stand still."""
    patient_agents(monkeypatch)
