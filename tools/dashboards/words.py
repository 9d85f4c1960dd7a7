"""Expressions that several panels share, so that a rate or a quantile is written in one way."""

from __future__ import annotations

HERE = 'instance=~"$instance"'
"""Only the processes that the dashboard is narrowed to."""


def rate(metric: str, *, by: str = "", where: str = "") -> str:
    """A counter's increase a second, summed."""
    return f"sum{_by(by)} (rate({metric}{_where(where)}[$__rate_interval]))"


def total(metric: str, *, by: str = "", where: str = "") -> str:
    """A gauge, summed."""
    return f"sum{_by(by)} ({metric}{_where(where)})"


def quantile(share: float, histogram: str, *, by: str = "", where: str = "") -> str:
    """Of a histogram's observations; `histogram` without _bucket."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{_where(where)}[$__rate_interval])))"


def mean(histogram: str, *, by: str = "", where: str = "") -> str:
    """Of a histogram's observations."""
    return f"{rate(histogram + '_sum', by=by, where=where)} / {rate(histogram + '_count', by=by, where=where)}"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def _where(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


def or_zero(expression: str) -> str:
    """For counters whose labels appear with their first event: before it, nothing has happened."""
    return f"{expression} or vector(0)"
