"""The report: one page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from kvpool.cli.bench_serve.plots import COLOURS, Plot, plots_of
from kvpool.cli.bench_serve.results import Result
from kvpool.cli.bench_serve.tables import (
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

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.45 system-ui, sans-serif; color: #1b1b1b; background: #fafafa; margin: 0; }
main { max-width: 1120px; margin: 0 auto; padding: 20px 24px 48px; }
h1 { font-size: 22px; margin: 8px 0 2px; } h2 { font-size: 17px; margin: 30px 0 8px; }
h3 { font-size: 14px; margin: 0; } p { margin: 4px 0; } .quiet { color: #5c5c5c; font-size: 13px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 14px 0; }
.card { background: #fff; border: 1px solid #ddd; border-top: 4px solid var(--own); border-radius: 6px;
  padding: 10px 16px 12px; flex: 1 1 240px; max-width: 560px; }
.card dl { display: grid; grid-template-columns: auto auto; gap: 1px 14px; margin: 6px 0 0; font-size: 14px; }
.card dt { color: #5c5c5c; } .card dd { margin: 0; text-align: right; font-variant-numeric: tabular-nums; }
.warnings { background: #fff6e0; border: 1px solid #e8c979; border-radius: 6px; padding: 8px 16px; }
.warnings ul { margin: 4px 0; padding-left: 20px; }
table { border-collapse: collapse; background: #fff; border: 1px solid #ddd; font-size: 14px; width: 100%; }
th, td { padding: 4px 12px; text-align: right; border-bottom: 1px solid #eee; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; } thead th { background: #f3f3f3; }
dl.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); gap: 8px 14px; margin: 12px 0; }
dl.pairs dt { color: #5c5c5c; font-size: 13px; } dl.pairs dd { margin: 0; font-size: 16px; }
table.words td, table.words th { text-align: left; }
tr.group td { border-top: 1px solid #bbb; }
td.better { color: #00704f; } td.worse { color: #b34700; }
.plots { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
figure { margin: 0; background: #fff; border: 1px solid #ddd; border-radius: 6px; padding: 10px 12px; min-width: 0; }
figure.wide { grid-column: 1 / -1; } figure svg { width: 100%; height: auto; display: block; }
pre { background: #fff; border: 1px solid #ddd; padding: 10px; overflow-x: auto; font-size: 12px; }
@media (max-width: 800px) { .plots { grid-template-columns: 1fr; } }
"""
_METHOD = """
<p>Latencies of an open loop count from the moment a request was <em>meant</em> to start, so the time it waited
because the server was behind is in them. Those of a closed loop count from sending: there, a slow server is asked
less often, and its queue does not show. Turns after the first one count from the end of the answer before and the
think time.</p>
<p>The first token is the first event that carried text, token ids or a tool call. Inter-token latency is the time
between such events; time per output token is that from the first to the last of them over the tokens between.
Percentiles are nearest rank, exact to 0.5 %. Requests that failed or were cut off are in no latency. Throughput is
over the time from the first counted moment to the last end, the tail included.</p>
<p>Shares by tier come from the servers' counters before and after the load, so whatever else they served in that time
is in them; warm-up requests are not, discarded ones are.</p>
"""


def html_report(results: Sequence[Result]) -> str:
    """The page. Whatever servers and files said is shown as text, never as markup."""
    title = " / ".join(result.name for result in results)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}: kvpool bench serve</title><style>{_STYLE}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        '<p class="quiet">kvpool bench serve: what users of an OpenAI-compatible server would see</p>',
        '<div class="cards">',
        *(_card(at, result) for at, result in enumerate(results)),
        "</div>",
        _warnings(results),
        "<h2>Figures</h2>",
        _table(results),
        "<h2>Plots</h2>",
        f'<div class="plots">{"".join(_figure(plot) for plot in plots_of(results))}</div>',
        _errors(results),
        "<h2>How this was measured</h2>",
        _METHOD,
        *(_details(result) for result in results),
        "</main></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _card(at: int, result: Result) -> str:
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
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs.items())
    colour = COLOURS[at % len(COLOURS)]
    return f'<section class="card" style="--own: {colour}"><h3>{escape(result.name)}</h3><dl>{rows}</dl></section>'


def _warnings(results: Sequence[Result]) -> str:
    several = len(results) > 1
    told = [
        (f"{result.name}: " if several else "") + str(warning)
        for result in results
        for warning in result.document["warnings"]
    ]
    told += comparison_warnings(results)
    if not told:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in told)
    return f'<div class="warnings"><h3>Read with care</h3><ul>{items}</ul></div>'


def _table(results: Sequence[Result]) -> str:
    if len(results) == 1:
        return _single_table(results[0])
    first = results[0].name
    headers = ["", *(result.name for result in results), *(f"{result.name} / {first}" for result in results[1:])]
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = []
    for rows in (latency_rows(results), throughput_rows(results), cache_rows(results)):
        body += [_table_row(row, begins_group=not at) for at, row in enumerate(rows)]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _single_table(result: Result) -> str:
    """One run: percentiles beside each other."""
    head = "".join(f"<th>{escape(header)}</th>" for header in LATENCY_HEADERS)
    lines = latency_lines(result)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>" for line in lines)
    rest = [*throughput_rows([result]), *cache_rows([result])]
    pairs = "".join(f"<div><dt>{escape(row.label)}</dt><dd>{escape(row.texts[0])}</dd></div>" for row in rest)
    return f'<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><dl class="pairs">{pairs}</dl>'


def _table_row(row: Row, *, begins_group: bool) -> str:
    cells = "".join(f"<td>{escape(text)}</td>" for text in [row.label, *row.texts])
    cells += "".join(f'<td class="{_judged(row, text)}">{escape(text)}</td>' for text in row.ratios[1:])
    return f'<tr class="{"group" if begins_group else ""}">{cells}</tr>'


def _judged(row: Row, ratio: str) -> str:
    """Which way a ratio points; within 3 % it points nowhere."""
    if row.smaller_is_better is None or ratio == "-" or abs(float(ratio) - 1) <= 0.03:
        return ""
    return "better" if (float(ratio) < 1) == row.smaller_is_better else "worse"


def _figure(plot: Plot) -> str:
    kind = ' class="wide"' if plot.wide else ""
    return (
        f'<figure{kind}><h3>{escape(plot.title)}</h3><p class="quiet">{escape(plot.note)}</p>'
        f'<div role="img" aria-label="{escape(plot.title)}">{plot.svg}</div></figure>'
    )


def _errors(results: Sequence[Result]) -> str:
    rows = [
        (result.name, kind, error)
        for result in results
        for kind, error in dict(result.document.get("errors") or {}).items()
    ]
    if not rows:
        return ""
    body = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(kind))}</td><td>{escape(str(error.get('count')))}</td>"
        f"<td>{escape('; '.join(map(str, error.get('examples', []))))}</td></tr>"
        for name, kind, error in rows
    )
    head = "<tr><th>run</th><th>kind</th><th>requests</th><th>for example</th></tr>"
    return f"<h2>Errors</h2><table class='words'><thead>{head}</thead><tbody>{body}</tbody></table>"


def _details(result: Result) -> str:
    shown: dict[str, Any] = {
        name: result.document.get(name) for name in ("command", "load", "load_id", "warm_up_requests", "requests")
    }
    shown["counters"] = (result.document.get("metrics") or {}).get("counters")
    text = escape(json.dumps(shown, indent=2))
    return f"<details><summary>{escape(result.name)}: options and counters</summary><pre>{text}</pre></details>"
