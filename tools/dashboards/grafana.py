"""The few kinds of panels that the dashboards need, as Grafana's JSON (schema 39, Grafana 10 and later)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_SCHEMA_VERSION = 39
_COLUMNS = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression; legend in Grafana's template language."""

    expression: str
    legend: str = "__auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """unit: Grafana's name of it. limits: values at which a stat or gauge changes its colour, as (value, colour)."""

    title: str
    description: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    stacked: bool = False
    limits: Sequence[tuple[float | None, str]] = ()
    minimum: float | None = None
    maximum: float | None = None
    names: Sequence[tuple[float, str, str]] = ()  # value, what it is called, colour


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading, from left to right."""

    title: str
    panels: Sequence[Panel]
    collapsed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """instances: a series whose `cluster`, `namespace` and `instance` labels the dashboard can be narrowed to."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    instances: str
    tags: Sequence[str] = field(default=("kvpool",))

    def document(self) -> dict[str, Any]:
        """The JSON document that Grafana provisions."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": list(self.tags),
            "schemaVersion": _SCHEMA_VERSION,
            "version": 1,
            "editable": False,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "",
            "links": [_other_dashboards()],
            "annotations": {"list": []},
            "templating": {"list": [_datasource(), *_choices(self.instances)]},
            "panels": _laid_out(self.rows),
        }


def _laid_out(rows: Sequence[Row]) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y, number = 0, 1
    for row in rows:
        heading = {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": row.collapsed,
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            "panels": [],
        }
        number, y, x, tallest = number + 1, y + 1, 0, 0
        inside: list[dict[str, Any]] = []
        for panel in row.panels:
            if x + panel.width > _COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            inside.append(_panel(panel, number, x, y))
            number, x, tallest = number + 1, x + panel.width, max(tallest, panel.height)
        y += tallest
        if row.collapsed:
            heading["panels"] = inside
            panels.append(heading)
        else:
            panels += [heading, *inside]
    return panels


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    instant = panel.kind in ("stat", "table", "bargauge")
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "targets": [_target(query, chr(ord("A") + index), instant, panel) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        **({"transformations": _one_table(panel.queries)} if panel.kind == "table" else {}),
    }


def _target(query: Query, letter: str, instant: bool, panel: Panel) -> dict[str, Any]:
    return {
        "refId": letter,
        "datasource": _SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
        "instant": instant,
        "range": not instant,
        "format": {"table": "table", "heatmap": "heatmap"}.get(panel.kind, "time_series"),
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.limits:
        steps = [{"value": value, "color": colour} for value, colour in panel.limits]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.names:
        options = {str(value): {"text": text, "color": colour} for value, text, colour in panel.names}
        defaults["mappings"] = [{"type": "value", "options": options}]
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {
            "colorMode": "value" if panel.limits or panel.names else "none",
            "graphMode": "none",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    if panel.kind == "bargauge":
        return {
            "displayMode": "basic",
            "orientation": "horizontal",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        }
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if panel.kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "tooltip": {"mode": "single"}}
    return {}


def _one_table(queries: Sequence[Query]) -> list[dict[str, Any]]:
    """One row for each set of labels, one column for each query, called by its legend."""
    names = {f"Value #{chr(ord('A') + index)}": query.legend for index, query in enumerate(queries)}
    return [
        {"id": "merge", "options": {}},
        {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": names}},
    ]


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "hide": 0,
        "refresh": 1,
    }


def _choices(selector: str) -> list[dict[str, Any]]:
    """Variables for the labels of targets, each narrowed by those before it. All: also series without the label."""
    metric, _, where = selector.rstrip("}").partition("{")
    choices: list[dict[str, Any]] = []
    chosen = [where] if where else []
    for label, title in (("cluster", "Cluster"), ("namespace", "Namespace"), ("instance", "Process")):
        query = (
            f"label_values({metric}{{{', '.join(chosen)}}}, {label})" if chosen else f"label_values({metric}, {label})"
        )
        chosen.append(f'{label}=~"${label}"')
        choices.append(
            {
                "name": label,
                "label": title,
                "type": "query",
                "datasource": _SOURCE,
                "definition": query,
                "query": {"query": query, "refId": label},
                "includeAll": True,
                "multi": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
                "refresh": 2,
                "sort": 1,
            }
        )
    return choices


def _other_dashboards() -> dict[str, Any]:
    return {
        "title": "kvpool",
        "type": "dashboards",
        "tags": ["kvpool"],
        "asDropdown": True,
        "includeVars": False,
        "keepTime": True,
        "targetBlank": False,
    }
