"""What each pagestore answered to one call: a table for people, a document for programs, an exit code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rich.table import Table

from kvpool.core.cluster import LiveNode
from kvpool.core.errors import KvPoolError
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK
from kvpool_cli.output import table
from kvpool_cli.targets import describe, said

AnswerT = TypeVar("AnswerT")


def nodes_table(
    answers: Sequence[tuple[LiveNode, AnswerT | KvPoolError]],
    headers: Sequence[str],
    cells: Callable[[AnswerT], Sequence[object]],
) -> Table:
    """A row for each node: the cells of its answer, or why there is none."""
    rows: list[list[object]] = []
    for node, answer in answers:
        shown = [*(["-"] * len(headers)), said(answer)] if isinstance(answer, KvPoolError) else [*cells(answer), ""]
        rows.append([node.info.node_id.hex()[:8], node.info.host_id, *shown])
    return table(["pagestore", "host", *headers, "error"], rows, right=range(2, 2 + len(headers)))


def nodes_document(
    answers: Sequence[tuple[LiveNode, AnswerT | KvPoolError]],
    counts: Callable[[AnswerT], Mapping[str, Any]],
    none: AnswerT,
) -> list[dict[str, Any]]:
    """An entry for each node: the counts of its answer, those of `none` beside an error."""
    return [
        {**describe(node, answer), **counts(none if isinstance(answer, KvPoolError) else answer)}
        for node, answer in answers
    ]


def exit_code(answers: Sequence[tuple[LiveNode, object]]) -> int:
    """1 if a node did not answer."""
    return EXIT_FAILED if any(isinstance(answer, KvPoolError) for _, answer in answers) else EXIT_OK
