"""SVG by hand, in colours for a light and a dark page. The same input gives the same bytes, so that pictures can be
compared with what is committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FONT = "-apple-system, 'Segoe UI', 'Noto Sans', 'Liberation Sans', Helvetica, Arial, sans-serif"


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours that read well on one of GitHub's pages; the page itself shows through."""

    name: str
    ink: str  # text
    on_bar: str  # text on the colours below
    faint: str  # text of less weight
    line: str  # borders and grids
    box: str  # ground of boxes
    accent_box: str  # ... of kvpool's own
    strong: str  # kvpool; bytes
    other: str  # what it is compared with
    third: str
    fourth: str


LIGHT = Theme(
    name="light",
    ink="#1f2328",
    on_bar="#ffffff",
    faint="#59636e",
    line="#d1d9e0",
    box="#f6f8fa",
    accent_box="#ddf4ff",
    strong="#0969da",
    other="#9aa4ae",
    third="#bc4c00",
    fourth="#1a7f37",
)
DARK = Theme(
    name="dark",
    ink="#f0f6fc",
    on_bar="#0d1117",
    faint="#9198a1",
    line="#3d444d",
    box="#151b23",
    accent_box="#12233f",
    strong="#4493f8",
    other="#7d8590",
    third="#f0883e",
    fourth="#3fb950",
)
THEMES = (LIGHT, DARK)


class Canvas:
    """Collects the parts of one picture, in pixels from its upper left corner."""

    def __init__(self, width: int, height: int, theme: Theme, title: str) -> None:
        self.width, self.height, self.theme = width, height, theme
        self._title = title
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 13,
        color: str = "",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """y: of the base line. anchor: start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        where = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{weight}'
        self._parts.append(f'<text {where} fill="{color or self.theme.ink}">{escape(text)}</text>')

    def lines(
        self, x: float, y: float, texts: Sequence[str], *, size: float, color: str, anchor: str = "start"
    ) -> None:
        """Lines of text below one another."""
        for number, text in enumerate(texts):
            self.text(x, y + number * size * 1.3, text, size=size, color=color, anchor=anchor)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str,
        stroke: str = "",
        dashed: bool = False,
        radius: float = 6,
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        border = f' stroke="{stroke}"{dash}' if stroke else ""
        where = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        self._parts.append(f'<rect {where} fill="{fill}"{border}/>')

    def path(
        self,
        points: Sequence[tuple[float, float]],
        *,
        color: str,
        width: float = 1.5,
        arrows: bool = False,
        dashed: bool = False,
    ) -> None:
        """A line through points. arrows: a head at both of its ends."""
        data = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(f'<path d="{data}" fill="none" stroke="{color}" stroke-width="{width:g}"{dash}/>')
        if arrows:
            self._head(points[1], points[0], color, width)
            self._head(points[-2], points[-1], color, width)

    def dot(self, x: float, y: float, color: str, radius: float = 3) -> None:
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{color}"/>')

    def svg(self) -> str:
        """The whole picture."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
            f' height="{self.height}" role="img" font-family="{FONT}">'
        )
        return "\n".join((head, f"<title>{escape(self._title)}</title>", *self._parts, "</svg>")) + "\n"

    def _head(self, before: tuple[float, float], tip: tuple[float, float], color: str, width: float) -> None:
        """A triangle at the end of a horizontal or vertical line."""
        size = 3 + 1.4 * width
        along = (_sign(tip[0] - before[0]), _sign(tip[1] - before[1]))
        base = (tip[0] - along[0] * size, tip[1] - along[1] * size)
        side = (along[1] * size * 0.6, along[0] * size * 0.6)
        points = (tip, (base[0] + side[0], base[1] + side[1]), (base[0] - side[0], base[1] - side[1]))
        corners = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polygon points="{corners}" fill="{color}"/>')


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
