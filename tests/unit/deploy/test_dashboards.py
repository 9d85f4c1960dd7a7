"""The dashboards that are provisioned are those that the code describes, and each panel can be asked and read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpool.connectors.vllm.connector_counters import ConnectorCounters
from tests.unit.deploy.promql import metrics_of, selectors_of
from tools.dashboards.__main__ import DASHBOARDS, DIRECTORY, texts

PANELS = [
    pytest.param(panel, id=f"{dashboard.uid} {panel['title']}")
    for dashboard in DASHBOARDS
    for panel in dashboard.document()["panels"]
    if panel["type"] != "row"
]


@pytest.mark.parametrize("name", texts())
def test_the_files_are_current(name: str) -> None:
    assert (DIRECTORY / name).read_text() == texts()[name], "run python -m tools.dashboards"


def test_there_are_no_other_files() -> None:
    assert {path.name for path in DIRECTORY.glob("*.json")} == set(texts())


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_can_be_asked_and_read(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith((".", ")."))
    assert panel["targets"]
    for target in panel["targets"]:
        for name in metrics_of(target["expr"]):
            assert name.startswith(("kvpool_", "vllm:", "redis_")) or name == "up", name


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_is_filtered_by_cluster_namespace_and_process(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for selector in selectors_of(target["expr"]):
            labels = {matcher.name for matcher in selector.matchers.matchers}
            missing = {"cluster", "namespace", "instance"} - labels
            # Redis has an exporter of its own, which is not among the processes to choose from.
            assert missing == ({"instance"} if str(selector.name).startswith("redis_") else set()), target["expr"]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_variables_default_to_all_series_also_those_without_the_label(dashboard: Any) -> None:
    variables = dashboard.document()["templating"]["list"]
    assert [one["name"] for one in variables] == ["datasource", "cluster", "namespace", "instance"]
    for variable in variables[1:]:
        assert (variable["current"]["value"], variable["allValue"]) == ("$__all", ".*")


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda one: one.uid)
def test_panels_have_numbers_and_places_of_their_own(dashboard: Any) -> None:
    panels = dashboard.document()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_what_is_asked_of_vllms_connector_is_what_it_counts() -> None:
    prefix = "vllm:kvpool_"
    asked = {
        name.removeprefix(prefix).removesuffix("_total")
        for panel in PANELS
        for target in json.loads(json.dumps(panel.values[0]))["targets"]
        for name in metrics_of(target["expr"])
        if name.startswith(prefix)
    }
    assert asked
    assert asked <= set(ConnectorCounters.__dataclass_fields__)
