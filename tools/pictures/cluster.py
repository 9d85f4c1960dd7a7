"""The picture of a cluster: who speaks what with whom."""

from __future__ import annotations

from collections.abc import Sequence

from tools.pictures.canvas import Canvas, Theme

WIDTH, HEIGHT = 1008, 548
_TITLE = (
    "A kvpool cluster: engines and agents share KV by descriptor, agents and pagestores arena slots likewise,"
    " pagestores stream pages to each other, and all speak gRPC with a stateless index over Redis"
)
_ENGINE_Y, _AGENT_Y, _STORE_Y, _INDEX_Y = 50, 166, 282, 432
_SMALL = 12.0


def cluster(theme: Theme) -> str:
    """Two hosts above the index and Redis."""
    canvas = Canvas(WIDTH, HEIGHT, theme, _TITLE)
    _host(canvas, "host A", 8, 568)
    _host(canvas, "host B", 698, 302)
    for x, name in ((28, "engine rank 0"), (356, "engine rank 1"), (718, "engine rank")):
        _box(canvas, x, _ENGINE_Y, 200, 52, name, "vLLM, SGLang, transformers, ...", own=False)
        _box(canvas, x, _AGENT_Y, 200, 52, "gpuagent", "gathers, scatters, verifies", own=True)
    for x, width in ((28, 528), (718, 248)):
        _pagestore(canvas, x, width)
    _sharing(canvas)
    _between_hosts(canvas)
    _index(canvas)
    _legend(canvas)
    return canvas.svg()


def _host(canvas: Canvas, name: str, x: float, width: float) -> None:
    canvas.box(x, 8, width, 380, fill="none", stroke=canvas.theme.line, dashed=True, radius=10)
    canvas.text(x + 20, 32, name, size=13, color=canvas.theme.faint, bold=True)


def _box(canvas: Canvas, x: float, y: float, width: float, height: float, name: str, what: str, *, own: bool) -> None:
    theme = canvas.theme
    fill, stroke = (theme.accent_box, theme.strong) if own else (theme.box, theme.other)
    canvas.box(x, y, width, height, fill=fill, stroke=stroke)
    canvas.text(x + width / 2, y + 22, name, size=15, anchor="middle", bold=True)
    canvas.text(x + width / 2, y + 41, what, size=_SMALL, color=theme.faint, anchor="middle")


def _pagestore(canvas: Canvas, x: float, width: float) -> None:
    theme = canvas.theme
    canvas.box(x, _STORE_Y, width, 92, fill=theme.accent_box, stroke=theme.strong)
    canvas.text(x + 12, _STORE_Y + 21, "pagestore", size=15, bold=True)
    tiers = (("staging arena", "shared memory"), ("disk tier", "verified pages"))
    each = (width - 36) / 2
    for number, (name, what) in enumerate(tiers):
        left = x + 12 + number * (each + 12)
        canvas.box(left, _STORE_Y + 32, each, 48, fill="none", stroke=theme.line, radius=4)
        canvas.text(left + each / 2, _STORE_Y + 52, name, size=13, anchor="middle")
        canvas.text(left + each / 2, _STORE_Y + 70, what, size=_SMALL, color=theme.faint, anchor="middle")


def _sharing(canvas: Canvas) -> None:
    """What each agent has with its engine and with the pagestore of its host."""
    for x in (28, 356, 718):
        _both(
            canvas,
            x + 14,
            _ENGINE_Y + 52,
            _AGENT_Y,
            ("cache mapped:", "CUDA IPC or", "shared memory"),
            ("session", "on a unix", "socket"),
        )
        _both(canvas, x + 14, _AGENT_Y + 52, _STORE_Y, ("arena mapped", "by descriptor"), ("session:", "slot leases"))


def _both(canvas: Canvas, x: float, top: float, bottom: float, mapped: Sequence[str], spoken: Sequence[str]) -> None:
    theme = canvas.theme
    canvas.path(((x, top + 2), (x, bottom - 2)), color=theme.strong, width=4, arrows=True)
    canvas.path(((x + 116, top + 2), (x + 116, bottom - 2)), color=theme.faint, arrows=True)
    first = (top + bottom) / 2 + 4 - (len(mapped) - 1) * _SMALL * 0.65
    canvas.lines(x + 10, first, mapped, size=_SMALL, color=theme.ink)
    canvas.lines(x + 124, first, spoken, size=_SMALL, color=theme.faint)


def _between_hosts(canvas: Canvas) -> None:
    theme = canvas.theme
    agents = _AGENT_Y + 26
    canvas.path(((230, agents), (354, agents)), color=theme.strong, width=4, arrows=True)
    canvas.lines(292, agents - 12, ("peer pulls",), size=_SMALL, color=theme.ink, anchor="middle")
    canvas.lines(292, agents + 20, ("GPU to GPU",), size=_SMALL, color=theme.ink, anchor="middle")
    pages = _STORE_Y + 56
    canvas.path(((558, pages), (716, pages)), color=theme.strong, width=4, arrows=True)
    canvas.lines(637, pages - 28, ("page streams",), size=_SMALL, color=theme.ink, anchor="middle")
    canvas.lines(637, pages - 12, ("gRPC, TLS",), size=_SMALL, color=theme.ink, anchor="middle")


def _index(canvas: Canvas) -> None:
    theme = canvas.theme
    for shift in (8, 4, 0):
        canvas.box(310 + shift, _INDEX_Y + shift, 682, 62, fill=theme.accent_box, stroke=theme.strong)
    canvas.text(651, _INDEX_Y + 26, "index (stateless replicas)", size=15, anchor="middle", bold=True)
    what = "which chunks exist, in which tier of which node; who is alive; where new chunks go"
    canvas.text(651, _INDEX_Y + 46, what, size=_SMALL, color=theme.faint, anchor="middle")
    _box(canvas, 8, _INDEX_Y, 180, 62, "Redis or Valkey", "may be lost: it is refilled", own=False)
    canvas.path(((190, _INDEX_Y + 31), (308, _INDEX_Y + 31)), color=theme.faint, arrows=True)
    canvas.lines(249, _INDEX_Y + 23, ("pipelines,",), size=_SMALL, color=theme.faint, anchor="middle")
    canvas.lines(249, _INDEX_Y + 48, ("Lua scripts",), size=_SMALL, color=theme.faint, anchor="middle")
    for x in (400, 738):
        canvas.path(((x, _STORE_Y + 94), (x, _INDEX_Y - 2)), color=theme.faint, arrows=True)
        canvas.text(x + 8, _INDEX_Y - 18, "announce, lease", size=_SMALL, color=theme.faint)
    for right, edge in ((556, 566), (918, 984)):
        y = _AGENT_Y + 26
        canvas.path(((right + 2, y), (edge, y), (edge, _INDEX_Y - 2)), color=theme.faint, arrows=True)
    canvas.text(574, _INDEX_Y - 18, "match, place", size=_SMALL, color=theme.faint)
    canvas.text(976, _INDEX_Y - 18, "match, place", size=_SMALL, color=theme.faint, anchor="end")


def _legend(canvas: Canvas) -> None:
    theme, y = canvas.theme, HEIGHT - 16
    canvas.path(((12, y), (44, y)), color=theme.strong, width=4)
    canvas.text(52, y + 4, "KV bytes; pages are verified wherever they cross", size=_SMALL)
    canvas.path(((390, y), (422, y)), color=theme.faint)
    canvas.text(430, y + 4, "gRPC control streams; every agent and pagestore has its own to the index", size=_SMALL)
