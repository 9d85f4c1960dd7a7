"""Plots of results, as SVG that stands inside a page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from bench.serve.results import Result
from bench.serve.tables import seconds_text, tier_names, tier_shares

# Okabe and Ito's colours: distinguishable with colour vision deficiencies.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#000000")
_TIER_COLOURS = {
    "own": "#0072b2",
    "peer": "#56b4e9",
    "staging": "#009e73",
    "disk": "#e69f00",
    "remote": "#cc79a7",
    "external": "#009e73",
    "computed": "#cfcfcf",
}
_NAME_CHARACTERS = 40
_WIDE, _HALF = (10.6, 3.1), (5.2, 3.3)
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: small, and found by a search
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.8,
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot. svg: markup without declaration. note: how to read it."""

    title: str
    note: str
    svg: str
    wide: bool = False


def plots_of(results: Sequence[Result]) -> list[Plot]:
    """All plots for which there are figures."""
    tiers = _tiers(results)
    halves = [
        _steps(results, "ttft", "Time to first token", "How many requests had their first token by then."),
        _steps(results, "e2e", "End to end", "How many answers were complete by then."),
        _steps(results, "itl", "Inter-token latency", "How many gaps between events of a stream were at most so long."),
        _by_turn(results),
    ]
    beside = sum(plot is not None for plot in halves)
    rest = [_by_prompt(results, wide=beside % 2 == 0), _over_time(results), _tokens_over_time(results)]
    return [plot for plot in (tiers, *halves, *rest) if plot is not None]


def _draw(
    name: str,
    size_inches: tuple[float, float],
    draw: Callable[[Axes], object],
    *,
    left_inches: float = 0.65,
    top_inches: float = 0.1,
) -> str:
    # The salt keeps ids of clip paths of several plots in one page apart, and the same from run to run.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size_inches)
        axes = figure.subplots()
        draw(axes)
        # Fixed margins: to let matplotlib fit them would mean to draw everything twice.
        width, height = size_inches
        figure.subplots_adjust(
            left=left_inches / width,
            right=1 - 0.2 / width,
            bottom=(0.5 if axes.get_xlabel() else 0.3) / height,
            top=1 - top_inches / height,
        )
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Ids of glyphs and markers start over in each figure; a page has one name space.
    prefix = re.sub(r"\W", "", name)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    return re.sub(r'href="#', f'href="#{prefix}-', svg)


def _steps(results: Sequence[Result], name: str, title: str, note: str) -> Plot | None:
    shown = [(at, result) for at, result in enumerate(results) if result.latency[name].count]
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for at, result in shown:
            values, shares = zip(*result.latency[name].steps(), strict=True)
            axes.step(values, shares, where="post", color=_colour(at), label=_plain(result.name), linewidth=1.6)
        _seconds_axis(axes, max(result.latency[name].maximum for _, result in shown))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1.02)
        for share in (0.5, 0.9, 0.99):
            axes.axhline(share, color="#bbbbbb", linewidth=0.8, linestyle=":")
        axes.legend(loc="upper left")

    return Plot(title, f"{note} Dotted: 50, 90 and 99 %.", _draw(f"steps-{name}", _HALF, draw))


def _tiers(results: Sequence[Result]) -> Plot | None:
    names = tier_names(results)
    if not names:
        return None

    def draw(axes: Axes) -> None:
        left = [0.0] * len(results)
        rows = range(len(results))
        for tier in names:
            shares = [share or 0.0 for share in tier_shares(results, tier)]
            axes.barh(rows, shares, left=left, height=0.55, color=_TIER_COLOURS.get(tier, "#56b4e9"), label=tier)
            for row, share in enumerate(shares):
                if share >= 0.04:
                    axes.text(left[row] + share / 2, row, f"{share:.0%}", ha="center", va="center", fontsize=9,
                              color="black" if tier == "computed" else "white")  # fmt: skip
            left = [before + share for before, share in zip(left, shares, strict=True)]
        for row, result in enumerate(results):
            if not result.document["tiers"]:
                axes.text(0.01, row, "its servers did not tell", va="center", fontsize=9, color="#777777")
        axes.set_yticks(rows, [_plain(result.name) for result in results])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(visible=False)
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(names))

    note = (
        "Prompt tokens by where their KV came from, out of the servers' counters before and after. Grey was computed."
    )
    size = (_WIDE[0], 0.75 + 0.45 * len(results))
    left_inches = 0.3 + 0.08 * max(len(_plain(result.name)) for result in results)
    svg = _draw("tiers", size, draw, left_inches=left_inches, top_inches=0.4)
    return Plot("Where the prompts' KV came from", note, svg, wide=True)


def _by_turn(results: Sequence[Result]) -> Plot | None:
    if max(len(result.ttft_by_turn) for result in results) < 2:
        return None

    def draw(axes: Axes) -> None:
        for at, result in enumerate(results):
            turns = [turn for turn, values in enumerate(result.ttft_by_turn) if values.count]
            medians = [result.ttft_by_turn[turn].percentile(50) for turn in turns]
            tails = [result.ttft_by_turn[turn].percentile(90) for turn in turns]
            numbers = [turn + 1 for turn in turns]
            axes.plot(numbers, medians, "o-", color=_colour(at), label=_plain(result.name), markersize=4)
            axes.plot(numbers, tails, "--", color=_colour(at), linewidth=1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("turn of the conversation")
        axes.legend(loc="best")

    note = "Median, and the 90th percentile dashed. Prompts grow with each turn; with a cache the time should not."
    return Plot("Time to first token by turn", note, _draw("turns", _HALF, draw))


def _by_prompt(results: Sequence[Result], *, wide: bool) -> Plot | None:
    note = "A point is a request. Without a cache, time grows with the prompt; what lies below the slope was loaded."
    draw = partial(_scatter, results=results, column=3, label="prompt tokens")
    return _of_sample(results, "Time to first token by prompt", note, "prompts", draw, wide=wide)


def _over_time(results: Sequence[Result]) -> Plot | None:
    note = "A point is a request. A slope upwards means that more comes in than the server can do."
    draw = partial(_scatter, results=results, column=0, label="when the request was meant to start, s")
    return _of_sample(results, "Time to first token over the run", note, "over-time", draw, wide=True)


def _scatter(axes: Axes, *, results: Sequence[Result], column: int, label: str) -> None:
    """Time to first token of the sampled requests over another column of the sample."""
    for at, result in enumerate(results):
        rows = result.document["sample"]
        points = [row[column] for row in rows], [row[1] for row in rows]
        look: dict[str, Any] = {"s": 7, "alpha": 0.45, "linewidths": 0, "clip_on": False}
        axes.scatter(*points, color=_colour(at), label=_plain(result.name), **look)
    _seconds_axis(axes, max(row[1] for result in results for row in result.document["sample"]), vertical=True)
    axes.set_xlim(left=0)
    axes.set_xlabel(label)
    axes.legend(loc="best", markerscale=2.5)


def _of_sample(
    results: Sequence[Result], title: str, note: str, name: str, draw: Callable[[Axes], object], *, wide: bool
) -> Plot | None:
    if not any(result.document["sample"] for result in results):
        return None
    return Plot(title, note, _draw(name, _WIDE if wide else _HALF, draw), wide=wide)


def _tokens_over_time(results: Sequence[Result]) -> Plot | None:
    if not any(result.document["timeline"]["bins"] for result in results):
        return None

    def draw(axes: Axes) -> None:
        for at, result in enumerate(results):
            timeline = result.document["timeline"]
            bin_s, bins = _coarser(float(timeline["bin_s"]), timeline["bins"])
            times = [index * bin_s for index in range(len(bins) + 1)]
            axes.stairs([row[3] / bin_s for row in bins], times, color=_colour(at), label=_plain(result.name))
            failed = [(index + 0.5) * bin_s for index, row in enumerate(bins) if row[2]]
            axes.plot(failed, [0] * len(failed), "x", color=_colour(at), markersize=6, clip_on=False)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.set_xlabel("s")
        axes.legend(loc="best")

    note = "A cross at the bottom marks a time in which requests failed."
    return Plot("Output tokens a second", note, _draw("tokens", _WIDE, draw), wide=True)


def _coarser(bin_s: float, bins: list[list[float]]) -> tuple[float, list[list[float]]]:
    """At most 100 steps: narrower ones show chance rather than change."""
    while len(bins) > 100:
        bins = [[a + b for a, b in zip(row, other, strict=True)] for row, other in _pairs(bins)]
        bin_s *= 2
    return bin_s, bins


def _pairs(bins: list[list[float]]) -> list[tuple[list[float], list[float]]]:
    padded = [*bins, [0.0] * len(bins[0])] if len(bins) % 2 else bins
    return list(zip(padded[::2], padded[1::2], strict=True))


def _seconds_axis(axes: Axes, largest_s: float, *, vertical: bool = False) -> None:
    """Logarithmic, where there is something above zero to show."""
    axis: Any = axes.yaxis if vertical else axes.xaxis
    if largest_s > 0:
        (axes.set_yscale if vertical else axes.set_xscale)("log")
        low, high = axes.get_ylim() if vertical else axes.get_xlim()
        # Few decades leave room for more than their powers of ten.
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 200 * low else (1.0,)))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_tick))


def _tick(value: float, _: object) -> str:
    return seconds_text(value).replace(".00 s", " s")


def _colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def _plain(text: str) -> str:
    """Not too long, and without what matplotlib takes for mathematics, or hides from a legend."""
    shown = text if len(text) <= _NAME_CHARACTERS else text[: _NAME_CHARACTERS - 1] + "…"
    return shown.replace("$", r"\$").lstrip("_") or "?"
