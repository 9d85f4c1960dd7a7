"""Where the demo's engines compute."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from kvpool.core.errors import KvPoolError, NotServed
from kvpool.cuda.driver import Driver

CHOICES = ("auto", "cpu", "cuda")


def pick_device(choice: str) -> str:
    """ "cpu" or "cuda". auto: cuda where torch sees a GPU that an agent can use too.

    Raises NotServed where cuda is asked for and cannot be had.
    """
    if choice == "cpu":
        return "cpu"
    missing = _what_cuda_misses()
    if missing is None:
        return "cuda"
    if choice == "cuda":
        raise NotServed(f"--device cuda: {missing}; use --device cpu")
    return "cpu"


def _what_cuda_misses() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if find_spec("triton") is None:
        return "triton, which the agent's kernels need, is not installed"
    try:
        Driver.load()
    except KvPoolError as error:
        return error.message
    return None
