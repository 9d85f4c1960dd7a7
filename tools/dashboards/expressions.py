"""Expressions that several panels share, so that a rate or a quantile is written in one way.

Every series is filtered by the dashboard's variables. `cluster` and `namespace` are labels of targets, which only some
installations set: a variable that is not chosen is `.*`, which also matches series without the label.
"""

from __future__ import annotations

_TARGET = 'cluster=~"$cluster", namespace=~"$namespace"'
_INSTANCE = 'instance=~"$instance"'


def series(metric: str, where: str = "") -> str:
    """A metric of the chosen processes."""
    return f"{metric}{{{', '.join(filter(None, (where, _TARGET, _INSTANCE)))}}}"


def exporter_series(metric: str) -> str:
    """A metric of another program in the chosen clusters and namespaces; its instances are not among the choices."""
    return f"{metric}{{{_TARGET}}}"


def rate(metric: str, *, by: str = "", where: str = "", window: str = "$__rate_interval") -> str:
    """A counter's increase a second, summed."""
    return f"sum{_by(by)} (rate({series(metric, where)}[{window}]))"


def increase(metric: str, window: str) -> str:
    """A counter's increase within `window`, summed."""
    return f"sum(increase({series(metric)}[{window}]))"


def total(metric: str, *, by: str = "", where: str = "", aggregate: str = "sum") -> str:
    """A gauge, summed or aggregated in another way."""
    return f"{aggregate}{_by(by)} ({series(metric, where)})"


def quantile(share: float, histogram: str, *, by: str = "") -> str:
    """Of a histogram's observations; `histogram` without _bucket."""
    labels = f"le, {by}" if by else "le"
    buckets = series(f"{histogram}_bucket")
    return f"histogram_quantile({share}, sum by ({labels}) (rate({buckets}[$__rate_interval])))"


def or_zero(expression: str) -> str:
    """For counters whose labels appear with their first event: before it, nothing has happened."""
    return f"{expression} or vector(0)"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
