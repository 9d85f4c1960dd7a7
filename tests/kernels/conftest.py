"""Kernels run on the GPU where there is one, else in Triton's interpreter on the CPU; the tests are the same."""

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Read when a kernel is defined, so before any module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"
else:
    # The transfer engine on host memory is for the interpreter; tests/gpu has the real one.
    collect_ignore = ["test_transfers.py"]


@pytest.fixture
def device() -> str:
    """Where tensors of a test lie: "cuda" or "cpu"."""
    return DEVICE
