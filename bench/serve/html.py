"""The report: one page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from bench.serve.plots import COLOURS, plots_of
from bench.serve.results import Result
from bench.serve.tables import (
    LATENCY_HEADERS,
    Row,
    cache_rows,
    comparison_warnings,
    latency_lines,
    latency_rows,
    seconds_text,
    share_text,
    throughput_rows,
)


def html_report(results: Sequence[Result]) -> str:
    """The page. Whatever servers and files said is shown as text, never as markup."""
    loader = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template("report.html.jinja")
    return template.render(
        title=" / ".join(result.name for result in results),
        cards=[_card(at, result) for at, result in enumerate(results)],
        warnings=_warnings(results),
        plots=plots_of(results),
        errors=[
            (result.name, kind, {"count": error.get("count"), "examples": error.get("examples", [])})
            for result in results
            for kind, error in dict(result.document.get("errors") or {}).items()
        ],
        details=[(result.name, _details(result)) for result in results],
        judged=_judged,
        **_figures(results),
    )


def _figures(results: Sequence[Result]) -> dict[str, Any]:
    """One run: percentiles beside each other. Several: runs beside each other, with ratios to the first."""
    if len(results) == 1:
        pairs = [*throughput_rows(results), *cache_rows(results)]
        return {"headers": LATENCY_HEADERS, "lines": latency_lines(results[0]), "groups": [], "pairs": pairs}
    first = results[0].name
    headers = ["", *(result.name for result in results), *(f"{result.name} / {first}" for result in results[1:])]
    groups = [latency_rows(results), throughput_rows(results), cache_rows(results)]
    return {"headers": headers, "lines": [], "groups": groups, "pairs": []}


def _card(at: int, result: Result) -> dict[str, Any]:
    document = result.document
    ttft = result.latency["ttft"]
    pairs = {
        "server": f"{document['model']} at {document['base_url']}",
        "load": ("open loop" if document["open_loop"] else "closed loop") + f", {document['load'].get('workload', '')}",
        "started": str(document["started_at"]),
        "first token, p50 / p99": f"{seconds_text(ttft.percentile(50))} / {seconds_text(ttft.percentile(99))}"
        if ttft.count
        else "-",
        "output tokens a second": f"{document['throughput']['output_tokens_per_s']:,.1f}",
        "requests": f"{document['requests']['ok']:,} well, {document['requests']['failed']:,} failed",
    }
    if document.get("goodput"):
        limits = ", ".join(f"{name} {seconds_text(limit)}" for name, limit in document["goodput"]["limits_s"].items())
        pairs[f"good ({limits})"] = share_text(document["goodput"]["share"])
    return {"name": result.name, "colour": COLOURS[at % len(COLOURS)], "pairs": pairs}


def _warnings(results: Sequence[Result]) -> list[str]:
    several = len(results) > 1
    facts = [
        (f"{result.name}: " if several else "") + str(warning)
        for result in results
        for warning in result.document["warnings"]
    ]
    return facts + comparison_warnings(results)


def _judged(row: Row, ratio: str) -> str:
    """Which way a ratio points; within 3 % it points nowhere."""
    if row.smaller_is_better is None or ratio == "-" or abs(float(ratio) - 1) <= 0.03:
        return ""
    return "better" if (float(ratio) < 1) == row.smaller_is_better else "worse"


def _details(result: Result) -> str:
    shown: dict[str, Any] = {
        name: result.document.get(name) for name in ("command", "load", "load_id", "warm_up_requests", "requests")
    }
    shown["counters"] = (result.document.get("metrics") or {}).get("counters")
    return json.dumps(shown, indent=2)
