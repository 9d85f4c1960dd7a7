"""Bars and lines on a canvas, all of one size, so that two stand side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tools.pictures.canvas import Canvas, Theme

WIDTH, HEIGHT = 480, 300
_TOP, _BOTTOM = 64, 288


@dataclass(frozen=True, slots=True)
class Series:
    """name: for the legend. color: of a theme."""

    name: str
    color: Callable[[Theme], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """rows: a label, and a value for each series. line: a value that is marked, as what all is compared with."""

    title: str
    note: str  # one line below the title
    series: tuple[Series, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]
    unit: str = ""  # behind each value
    digits: int = 2
    line: float | None = None

    def draw(self, theme: Theme) -> str:
        canvas = _frame(self.title, self.note, theme, self.series if len(self.series) > 1 else ())
        label_width = 14 + max(7.5 * len(label) for label, _ in self.rows)
        left, right = label_width, WIDTH - 60
        scale = (right - left) / max(self.line or 0, *(value for _, values in self.rows for value in values))
        top = _TOP + (20 if len(self.series) > 1 else 0)
        step = (_BOTTOM - top) / len(self.rows)
        bar = min(22.0, (step - 8) / len(self.series))
        if self.line is not None:
            x = left + self.line * scale
            canvas.path(((x, top), (x, _BOTTOM)), color=theme.ink, width=1, dashed=True)
        for number, (label, values) in enumerate(self.rows):
            middle = top + step * (number + 0.5)
            canvas.text(left - 8, middle + 4, label, size=12.5, anchor="end")
            for at, (value, series) in enumerate(zip(values, self.series, strict=True)):
                y = middle + (at - len(values) / 2) * bar
                end, text = left + value * scale, f"{value:.{self.digits}f}{self.unit}"
                canvas.box(left, y + 1, max(1.0, value * scale), bar - 2, fill=series.color(theme), radius=2)
                # Beside its bar, unless the marked line stands there.
                if self.line is not None and 0.85 * self.line < value < 1.1 * self.line:
                    canvas.text(end - 5, y + bar / 2 + 4, text, size=min(12, bar), color=theme.on_bar, anchor="end")
                else:
                    canvas.text(end + 5, y + bar / 2 + 4, text, size=min(12, bar))
        return canvas.svg()


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Curves over the same places, which stand at equal distances."""

    title: str
    note: str
    series: tuple[Series, ...]
    places: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]  # of each series
    across: str  # what the places are
    percent_max: int
    percent_step: int = 10

    def draw(self, theme: Theme) -> str:
        canvas = _frame(self.title, self.note, theme, self.series)
        left, right, top, bottom = 44, WIDTH - 20, _TOP + 22, HEIGHT - 44

        def at(place: int, share: float) -> tuple[float, float]:
            x = left + 12 + (right - left - 24) * place / (len(self.places) - 1)
            return round(x, 1), round(bottom - (bottom - top) * share * 100 / self.percent_max, 1)

        for percent in range(0, self.percent_max + 1, self.percent_step):
            y = at(0, percent / 100)[1]
            canvas.path(((left, y), (right, y)), color=theme.line, width=1)
            canvas.text(left - 6, y + 4, f"{percent} %", size=12, color=theme.faint, anchor="end")
        for place, name in enumerate(self.places):
            canvas.text(at(place, 0)[0], bottom + 18, name, size=12, color=theme.faint, anchor="middle")
        canvas.text((left + right) / 2, HEIGHT - 8, self.across, size=12, color=theme.faint, anchor="middle")
        for series, values in zip(self.series, self.values, strict=True):
            points = [at(place, value) for place, value in enumerate(values)]
            canvas.path(points, color=series.color(theme), width=2)
            for point in points:
                canvas.dot(*point, series.color(theme))
        return canvas.svg()


def _frame(title: str, note: str, theme: Theme, legend: Sequence[Series]) -> Canvas:
    canvas = Canvas(WIDTH, HEIGHT, theme, title)
    canvas.text(8, 20, title, size=15, bold=True)
    canvas.text(8, 40, note, size=12, color=theme.faint)
    x = 8.0
    for series in legend:
        canvas.box(x, 53, 11, 11, fill=series.color(theme), radius=2)
        canvas.text(x + 16, 63, series.name, size=12)
        x += 30 + 6.6 * len(series.name)
    return canvas
