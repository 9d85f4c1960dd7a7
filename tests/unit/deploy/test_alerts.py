"""Each alert can be asked, has a test for promtool, and a section in the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.promql import metrics_of

REPOSITORY = Path(__file__).resolve().parents[3]
ALERTS = REPOSITORY / "k8s" / "alerts"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((ALERTS / "kvpool.rules.yml").read_text())["groups"] for rule in group["rules"]
]
TESTED = set(re.findall(r"alertname: (\w+)", (ALERTS / "kvpool.rules.test.yml").read_text()))
SECTIONS = {
    line[3:].lower() for line in (REPOSITORY / "docs" / "runbook.md").read_text().splitlines() if line[:3] == "## "
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_whole(rule: dict[str, Any]) -> None:
    metrics_of(rule["expr"])
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
    assert rule["alert"].lower() in SECTIONS
    assert rule["alert"] in TESTED


def test_the_runbook_has_no_section_of_an_alert_that_is_gone() -> None:
    assert {rule["alert"].lower() for rule in RULES} == SECTIONS


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which comes with Prometheus")
def test_alerts_fire_and_are_silent() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "kvpool.rules.test.yml"], cwd=ALERTS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
