"""What a PromQL expression asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser

# What Grafana fills in before it asks.
_MACROS = {"$__rate_interval": "1m", "$__range": "15m", "$instance": ".*"}


def filled(expression: str) -> str:
    """Without Grafana's macros."""
    for macro, value in _MACROS.items():
        expression = expression.replace(macro, value)
    return expression


def metrics_of(expression: str) -> set[str]:
    """Names of the series that an expression reads. Raises ValueError if it cannot be parsed."""
    return {name for name in _names(promql_parser.parse(filled(expression))) if name}


def grouped_labels_of(expression: str) -> set[str]:
    """Labels that its aggregations keep."""
    lists = re.findall(r"by\s*\(([^)]*)\)", expression)
    return {label.strip() for labels in lists for label in labels.split(",")} - {"le", "instance", "job"}


def _names(node: Any) -> Iterator[str]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node.name or ""
        return
    for part in ("vector_selector", "vs", "expr", "lhs", "rhs"):
        if (inner := getattr(node, part, None)) is not None:
            yield from _names(inner)
    for argument in getattr(node, "args", None) or ():
        yield from _names(argument)
