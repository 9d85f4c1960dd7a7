"""What a PromQL expression asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser

# What Grafana fills in before it asks.
_VARIABLES = ("cluster", "namespace", "instance")
_MACROS = {"$__rate_interval": "1m", "$__range": "15m"} | {f"${name}": ".*" for name in _VARIABLES}


def filled(expression: str) -> str:
    """Without Grafana's macros."""
    for macro, value in _MACROS.items():
        expression = expression.replace(macro, value)
    return expression


def metrics_of(expression: str) -> set[str]:
    """Names of the series that an expression reads. Raises ValueError if it cannot be parsed."""
    return {selector.name for selector in selectors_of(expression) if selector.name}


def selectors_of(expression: str) -> list[promql_parser.VectorSelector]:
    """Its selectors of series, in order. Raises ValueError if it cannot be parsed."""
    return list(_selectors(promql_parser.parse(filled(expression))))


def grouped_labels_of(expression: str) -> set[str]:
    """Labels that its aggregations keep."""
    lists = re.findall(r"by\s*\(([^)]*)\)", expression)
    return {label.strip() for labels in lists for label in labels.split(",")} - {"le", "instance", "job"}


def _selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
        return
    for part in ("vector_selector", "vs", "expr", "lhs", "rhs"):
        if (inner := getattr(node, part, None)) is not None:
            yield from _selectors(inner)
    for argument in getattr(node, "args", None) or ():
        yield from _selectors(argument)
