"""Figures of one or more results side by side: rows that the terminal and the report both show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.serve.distribution import PERCENTILES
from bench.serve.results import Result
from kvpool_cli.output import as_text, table

LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of each result. values: None where a result does not have it. ratios: beside the first result's."""

    label: str
    texts: list[str]
    ratios: list[str]
    smaller_is_better: bool | None = None


def latency_rows(results: Sequence[Result]) -> list[Row]:
    """Percentiles of each latency."""
    rows = []
    for name, label in LATENCIES.items():
        for percent in PERCENTILES:
            values = [
                result.latency[name].percentile(percent) if result.latency[name].count else None for result in results
            ]
            rows.append(_row(f"{label}, p{percent}", values, seconds_text, smaller_is_better=True))
        values = [result.latency[name].mean if result.latency[name].count else None for result in results]
        rows.append(_row(f"{label}, mean", values, seconds_text, smaller_is_better=True))
    return rows


LATENCY_HEADERS = ["", *(f"p{percent}" for percent in PERCENTILES), "mean", "largest"]


def latency_lines(result: Result) -> list[list[str]]:
    """The latencies of one result, a line each, under LATENCY_HEADERS."""
    lines = []
    for name, label in LATENCIES.items():
        found = result.latency[name]
        values = [*(found.percentile(percent) for percent in PERCENTILES), found.mean, found.maximum]
        lines.append([label, *(seconds_text(value) if found.count else "-" for value in values)])
    return lines


def throughput_rows(results: Sequence[Result]) -> list[Row]:
    """What went through, and what did not."""
    documents = [result.document for result in results]
    rows = [
        _row("requests that ended well", [d["requests"]["ok"] for d in documents], _count_text),
        _row("requests that failed", [d["requests"]["failed"] for d in documents], _count_text),
        _row(
            "cut off or left out",
            [d["requests"]["unfinished"] + d["requests"]["discarded"] for d in documents],
            _count_text,
        ),
        _row("measured for", [d["elapsed_s"] for d in documents], seconds_text),
        _row("requests a second", [d["throughput"]["requests_per_s"] for d in documents], _rate_text, False),
        _row("output tokens a second", [d["throughput"]["output_tokens_per_s"] for d in documents], _rate_text, False),
        _row("prompt tokens a second", [d["throughput"]["prompt_tokens_per_s"] for d in documents], _rate_text, False),
    ]
    if any(d.get("goodput") for d in documents):
        good = [d["goodput"] for d in documents]
        rows.append(
            _row("good requests a second", [g["requests_per_s"] if g else None for g in good], _rate_text, False)
        )
        rows.append(_row("good requests", [g["share"] if g else None for g in good], share_text, False))
    return rows


def cache_rows(results: Sequence[Result]) -> list[Row]:
    """Prompt tokens by where their KV came from."""
    rows = []
    cached = []
    for result in results:
        tokens = result.document["tokens"]
        known = tokens.get("cached") is not None and tokens["prompt"]
        cached.append(tokens["cached"] / tokens["prompt"] if known else None)
    rows.append(_row("cached, as answers say", cached, share_text, False))
    for tier in tier_names(results):
        rows.append(_row(f"from {tier}" if tier != "computed" else tier, tier_shares(results, tier), share_text))
    return rows


def tier_names(results: Sequence[Result]) -> list[str]:
    """Tiers of any result, the nearest first."""
    found = {tier for result in results for tier in result.document["tiers"] or {}}
    order = ["own", "peer", "staging", "disk", "remote", "external"]
    return [*(t for t in order if t in found), *sorted(found - {*order, "computed"}), *(["computed"] if found else [])]


def tier_shares(results: Sequence[Result], tier: str) -> list[float | None]:
    """The share of prompt tokens that came from a tier, for each result."""
    shares: list[float | None] = []
    for result in results:
        tiers = result.document["tiers"]
        total = sum(tiers.values()) if tiers else 0
        shares.append(tiers.get(tier, 0) / total if tiers and total else None)
    return shares


def render(results: Sequence[Result]) -> str:
    """Tables for people at a terminal."""
    parts = []
    if len(results) == 1:
        parts.append(
            as_text(table(LATENCY_HEADERS, latency_lines(results[0]), right=list(range(1, len(LATENCY_HEADERS)))))
        )
    groups = [throughput_rows(results), *([latency_rows(results)] if len(results) > 1 else []), cache_rows(results)]
    for rows in groups:
        headers = ["", *(result.name for result in results), *(f"{r.name} / {results[0].name}" for r in results[1:])]
        lines = [[row.label, *row.texts, *row.ratios[1:]] for row in rows]
        parts.append(as_text(table(headers, lines, right=list(range(1, len(headers))))))
    for result in results:
        errors = result.document.get("errors", {})
        parts += [
            f"{result.name}: {kind} {error['count']}: {'; '.join(error['examples'])}" for kind, error in errors.items()
        ]
        parts += [f"{result.name}: {warning}" for warning in result.document["warnings"]]
    parts += comparison_warnings(results)
    return "\n\n".join(parts)


def comparison_warnings(results: Sequence[Result]) -> list[str]:
    """What makes results hard to compare."""
    if len({result.document.get("load_id") for result in results}) > 1:
        return ["These results are not of the same load: options that decide it differ. Ratios mean little."]
    return []


def _row(label: str, values: Sequence[float | None], text: object, smaller_is_better: bool | None = None) -> Row:
    assert callable(text)
    first = values[0]
    ratios = [f"{value / first:.2f}" if value is not None and first else "-" for value in values]
    return Row(label, ["-" if value is None else text(value) for value in values], ratios, smaller_is_better)


def seconds_text(value_s: float) -> str:
    """Three figures, in ms below a second."""
    return f"{value_s:,.2f} s" if value_s >= 1 else f"{value_s * 1e3:.3g} ms"


def share_text(value: float) -> str:
    """Per cent."""
    return f"{value:.1%}"


def _count_text(value: float) -> str:
    return f"{value:,.0f}"


def _rate_text(value: float) -> str:
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
