"""Which path the pages of a batch take: the copy engine alone, or kernels."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from kvpool.core.cancel import CancelToken
from kvpool_gpuagent.adapters.gpu.cache import PathSelector
from kvpool_gpuagent.adapters.gpu.copy_paths import CopyPath
from kvpool_gpuagent.adapters.gpu.transfer_queue import TransferQueue
from kvpool_gpuagent.core.pages import CopyBatch

RUNS, KERNELS = cast(CopyPath, object()), cast(CopyPath, object())
LONG, SHORT = 1, 0


def batch(*shards: int) -> CopyBatch:
    count = len(shards)
    zeros = np.zeros(count, dtype=np.int64)
    return CopyBatch(zeros, np.array(shards, dtype=np.uint8), zeros[:, np.newaxis], zeros)


@pytest.mark.parametrize(
    ("shards", "runs", "kernels", "taken"),
    [
        ([LONG, LONG], RUNS, KERNELS, RUNS),
        ([SHORT, SHORT], RUNS, KERNELS, KERNELS),
        ([LONG, SHORT], RUNS, KERNELS, KERNELS),
        ([LONG, SHORT], RUNS, None, RUNS),
        ([SHORT], None, KERNELS, KERNELS),
    ],
)
def test_a_batch_takes_the_copy_engine_alone_if_all_its_runs_are_long_or_nothing_else_is_there(
    shards: list[int], runs: CopyPath | None, kernels: CopyPath | None, taken: CopyPath
) -> None:
    by_runs = np.array([False, runs is not None])
    assert PathSelector(cast(TransferQueue, None), runs, kernels, by_runs).path(batch(*shards)) is taken


async def test_a_batch_of_no_page_is_moved_without_a_queue() -> None:
    assert await PathSelector(cast(TransferQueue, None), RUNS, None, np.array([True])).move(batch(), CancelToken())
