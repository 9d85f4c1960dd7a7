"""How the KV of a left-padded batch comes together: which part of each row is had, copied or computed. Pure.

A row's own tokens are the last ones of the batch's columns; what is before them is padding. `generate` can take over
at one column for all rows only, the cut: left of it every row has to be complete, right of it all rows are computed
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# What a row that is completed alone costs beside its tokens, in tokens: a forward pass reads all weights, however few
# tokens it is for, and a GPU waits for its launches. The order of magnitude counts: this decides between one pass for
# all rows and one more for each. bench.batch_rows measures it: 208 for a tiny model on 16 cores, 1,395 for an 8B model
# on an H200, where it varies much with the host.
PASS_TOKENS = 128
GPU_PASS_TOKENS = 1024

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row left of the cut: copied_from (a row before, or None: the chunks that were found) gives the first
    `ready` tokens, the `computed` next ones are computed for this row alone."""

    ready: int
    computed: int
    copied_from: int | None


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """cut: columns that are complete before all rows are computed together; at least one column is left for that."""

    cut: int
    rows: tuple[RowPlan, ...]


def common_prefixes(rows: Sequence[npt.NDArray[np.generic]]) -> Ints:
    """[rows, rows]: leading tokens that a row has in common with each of the rows before it, else 0."""
    common = np.zeros((len(rows), len(rows)), dtype=np.int64)
    for later, row in enumerate(rows):
        for earlier in range(later):
            length = min(len(row), len(rows[earlier]))
            differs = np.flatnonzero(row[:length] != rows[earlier][:length])
            common[later, earlier] = differs[0] if len(differs) else length
    return common


def plan_batch(
    rows: Sequence[npt.NDArray[np.generic]], known: Sequence[int], width: int, pass_tokens: int = PASS_TOKENS
) -> BatchPlan:
    """The cut with the fewest tokens to compute.

    rows: each row's own tokens, at least one. known: leading tokens of each whose KV was found. width: of the batch.
    pass_tokens: what a pass for one row costs beside its tokens.
    """
    found, common = np.asarray(known, dtype=np.int64), common_prefixes(rows)
    padding = width - np.array([len(row) for row in rows], dtype=np.int64)
    ends = {*(padding + found).tolist(), *(padding + common.max(axis=1)).tolist(), width - 1}
    plans = (_plan(min(cut, width - 1), padding, found, common) for cut in sorted(ends))
    return min(plans, key=lambda plan: _cost(plan, width, pass_tokens))


def _plan(cut: int, padding: Ints, found: Ints, common: Ints) -> BatchPlan:
    filled = np.maximum(0, cut - padding)  # own tokens of each row left of the cut
    rows = []
    for number in range(len(padding)):
        wanted = int(filled[number])
        shared = np.minimum(common[number, :number], filled[:number])
        best = int(shared.argmax()) if number else 0
        if number and min(wanted, shared[best]) > min(wanted, found[number]):
            ready, copied_from = int(min(wanted, shared[best])), best
        else:
            ready, copied_from = int(min(wanted, found[number])), None
        rows.append(RowPlan(ready, wanted - ready, copied_from))
    return BatchPlan(cut, tuple(rows))


def _cost(plan: BatchPlan, width: int, pass_tokens: int) -> int:
    alone = sum(row.computed + pass_tokens for row in plan.rows if row.computed)
    return alone + len(plan.rows) * (width - plan.cut)
