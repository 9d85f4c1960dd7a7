"""Charts as SVG, by matplotlib, in colours for a light and a dark page. The page shows through."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from tools.pictures.charts import BarChart, Color, LineChart

_INCHES = (6.4, 4.0)
_INK = {"light": "#1f2328", "dark": "#f0f6fc"}
_FAINT = {"light": "#59636e", "dark": "#9198a1"}
_GRID = {"light": "#d1d9e0", "dark": "#3d444d"}
_COLORS = {
    "light": {Color.KVPOOL: "#0969da", Color.BASELINE: "#9aa4ae", Color.THIRD: "#bc4c00", Color.FOURTH: "#1a7f37"},
    "dark": {Color.KVPOOL: "#4493f8", Color.BASELINE: "#7d8590", Color.THIRD: "#f0883e", Color.FOURTH: "#3fb950"},
}


def _style(title: str, theme: str) -> AbstractContextManager[None]:
    return mpl.rc_context(
        {
            "svg.hashsalt": title,  # ids of glyphs and clip paths are random otherwise
            "svg.fonttype": "none",  # text stays text
            "font.size": 11,
            "text.color": _INK[theme],
            "axes.labelcolor": _FAINT[theme],
            "xtick.color": _FAINT[theme],
            "ytick.color": _FAINT[theme],
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.bottom": False,
            "axes.edgecolor": _GRID[theme],
            "grid.color": _GRID[theme],
            "legend.frameon": False,
        }
    )


def draw(chart: BarChart | LineChart, theme: str, description: str) -> str:
    """The SVG. description: goes into its metadata. Equal for equal input and version of matplotlib."""
    with _style(chart.title, theme):
        figure = Figure(figsize=_INCHES)
        has_legend = len(chart.series) > 1
        figure.set_layout_engine("constrained", rect=(0.01, 0, 0.98, 0.77 if has_legend else 0.85))
        figure.text(0.015, 0.93, chart.title, size=14, weight="bold")
        figure.text(0.015, 0.865, chart.note, color=_FAINT[theme])
        handles: Sequence[Artist]
        if isinstance(chart, BarChart):
            handles = _bars(figure.add_subplot(), chart, theme)
        else:
            handles = _lines(figure.add_subplot(), chart, theme)
        if has_legend:
            figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.005, 0.86), ncols=len(handles))
        written = io.StringIO()
        metadata = {"Title": chart.title, "Description": description, "Date": None, "Creator": None}
        figure.savefig(written, format="svg", transparent=True, metadata=metadata)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def _bars(axes: Axes, chart: BarChart, theme: str) -> list[Patch]:
    handles = []
    thickness = min(0.8 / len(chart.series), 0.5)
    for number, series in enumerate(chart.series):
        shift = (number - (len(chart.series) - 1) / 2) * thickness
        places = [row + shift for row in range(len(chart.rows))]
        values = [values[number] for _, values in chart.rows]
        color = _COLORS[theme][series.color]
        bars = axes.barh(places, values, thickness * 0.88, color=color)
        axes.bar_label(bars, fmt=f"{{:.{chart.digits}f}}{chart.unit}", padding=4)
        handles.append(Patch(color=color, label=series.name))
    axes.set_yticks(range(len(chart.rows)), [label for label, _ in chart.rows], color=_INK[theme])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.xaxis.set_visible(False)
    axes.margins(x=0.14, y=0.02)
    if chart.line is not None:
        axes.axvline(chart.line, color=_INK[theme], linewidth=1, linestyle="--", zorder=0)
    return handles


def _lines(axes: Axes, chart: LineChart, theme: str) -> list[Line2D]:
    handles = []
    for series, values in zip(chart.series, chart.values, strict=True):
        percents = [100 * value for value in values]
        color = _COLORS[theme][series.color]
        handles += axes.plot(chart.places, percents, marker="o", markersize=5, color=color, label=series.name)
    axes.set_ylim(0, chart.percent_max)
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axes.set_xlabel(chart.across)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    return handles
