"""The agent's GPU path with kernels in Triton's interpreter, on host memory: bad input, faults and races.

Left out where there is a GPU: there kernels are compiled, and compiled ones cannot reach host memory. tests/gpu has the
same cases on real devices.
"""

import os

import torch

if torch.cuda.is_available():
    collect_ignore_glob = ["*"]
else:
    # Read when a kernel is defined, so before any module with kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"
