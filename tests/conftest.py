"""What holds for every test: how many threads it computes on, how hypothesis runs, and where `gpu` tests run."""

import gc
import os
from collections.abc import Generator

import hypothesis
import pytest

# Before torch and numpy are imported, and for all processes that tests start: several workers share few cores, and the
# threads of one operator wait for each other by spinning. Tests of small models took up to twenty times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline for one example: the machine may be busy with other tests. The blob replays a failure exactly.
hypothesis.settings.register_profile("kvpool", deadline=None, print_blob=True)
# The gate takes the same examples each time: what it says is about the commit. `make test` goes on searching.
hypothesis.settings.register_profile("gate", hypothesis.settings.get_profile("kvpool"), derandomize=True)
hypothesis.settings.load_profile("gate" if "KVPOOL_CI_RUN" in os.environ else "kvpool")


def has_cuda() -> bool:
    """Whether torch finds a CUDA device; imports torch, which takes seconds."""
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector, and keep it off the result.

    Modules and test items live until the end: walking over them was half of the processor time of a collection, and
    part of each full collection during the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the `gpu` tests out where there is no GPU, so that a skip always means that something is wrong."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu and not has_cuda():
        items[:] = [item for item in items if item not in on_gpu]
        config.hook.pytest_deselected(items=on_gpu)
