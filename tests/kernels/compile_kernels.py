"""Compiles the copy kernels for a GPU that need not be there, and prints what the test looks at; see test_compiled.py.

A process of its own: the tests have Triton's interpreter where there is no GPU.
"""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpool_gpuagent.kernels.copying import tiling
from kvpool_gpuagent.kernels.gather import gather_kernel
from kvpool_gpuagent.kernels.peer_pull import WARPS, PullShape, pull_kernel
from kvpool_gpuagent.kernels.scatter import scatter_kernel
from kvpool_gpuagent.kernels.tables import CopyShape


def compiled(kernel: Any, constants: dict[str, Any], warps: int) -> str:
    """The kernel's PTX for sm_90, which ptxas has accepted."""
    signature = {
        param.name: "constexpr" if param.name in constants else param.annotation_type for param in kernel.params
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return str(built.asm["ptx"])


def main() -> None:
    """One JSON object: PTX by kernel."""
    heads, tokens = CopyShape(256, 16, 8, 256, 16, 64, 2, 16), CopyShape(256, 1, 1, 1152, 16, 64, 1, 16)
    pull, scales = PullShape(4, 256, 16, 16, 64), PullShape(1, 16, 16, 16, 64)
    pulled = pull.constants() | scales.constants("SCALE_") | {"HAS_SCALES": True}
    texts = {"pull": compiled(pull_kernel, pulled, WARPS)}
    for name, shape in (("heads", heads), ("tokens", tokens)):
        cut = tiling(shape)
        constants = {"FIRST_PLANE": 1} | cut.constants(shape)
        texts[f"gather {name}"] = compiled(gather_kernel, constants, cut.warps)
        texts[f"scatter {name}"] = compiled(scatter_kernel, constants, cut.warps)
    json.dump(texts, sys.stdout)


if __name__ == "__main__":
    main()
