"""The terminal of `kvpool top`: curses, which sends only what changed, so that nothing flickers over a slow line."""

from __future__ import annotations

import curses
import os
import time
from collections.abc import Callable

from kvpool_cli.output import CommandFailed, cut, printable
from kvpool_cli.top_render import BAD, DIM, HEAD, PLAIN, SORTS, Line, render
from kvpool_cli.top_view import View

_KEY_WAIT_MS = 100
_QUIT = {ord("q"), ord("Q"), 27}


def show(next_view: Callable[[float], View | str | None], sort: str) -> None:
    """Draw what `next_view` gives until q is pressed. Raises CommandFailed for a terminal that curses does not know."""
    try:
        curses.setupterm()
    except curses.error as error:
        term = os.environ.get("TERM", "")
        raise CommandFailed(f"TERM is {term!r}: {error}; set TERM=xterm-256color, or give --once") from error
    curses.wrapper(lambda window: _Screen(window, next_view, sort).run())


class _Screen:
    def __init__(self, window: curses.window, next_view: Callable[[float], View | str | None], sort: str) -> None:
        self._window = window
        self._next_view = next_view
        self._sort = sort
        self._view: View | None = None
        self._trouble = "looking ..."
        self._first_host = 0
        self._styles = {PLAIN: curses.A_NORMAL, HEAD: curses.A_BOLD, BAD: curses.A_REVERSE, DIM: curses.A_DIM}

    def run(self) -> None:
        curses.curs_set(0) if curses.tigetstr("civis") else None
        self._window.timeout(_KEY_WAIT_MS)
        self._draw()
        while True:
            news = self._next_view(0.0) if self._view is not None else self._next_view(0.05)
            if isinstance(news, View):
                self._view, self._trouble = news, ""
            elif news is not None:
                self._trouble = news
            key = self._window.getch()
            if key in _QUIT:
                return
            if self._on_key(key) or news is not None:
                self._draw()

    def _on_key(self, key: int) -> bool:
        """Whether it changed what is shown."""
        lines, _ = self._window.getmaxyx()
        steps = {
            curses.KEY_DOWN: 1,
            curses.KEY_UP: -1,
            curses.KEY_NPAGE: lines // 2,
            curses.KEY_PPAGE: -(lines // 2),
            curses.KEY_HOME: -(1 << 30),
        }
        if key in steps:
            most = len(self._view.hosts) if self._view is not None else 0
            self._first_host = max(0, min(most, self._first_host + steps[key]))
        elif key == ord("s"):
            self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]
        elif key == curses.KEY_RESIZE:
            curses.update_lines_cols()
            self._window.clear()
        else:
            return False
        return True

    def _draw(self) -> None:
        lines, columns = self._window.getmaxyx()
        drawn: list[Line] = []
        if self._view is not None:
            clock = time.strftime("%H:%M:%S")
            drawn = render(
                self._view,
                columns=columns,
                lines=lines - bool(self._trouble),
                sort=self._sort,
                first_host=self._first_host,
                clock=clock,
            )
        if self._trouble:
            drawn.append(Line(cut(printable(self._trouble), columns), BAD))
        self._window.erase()
        for at, line in enumerate(drawn[:lines]):
            # The last cell of the last line cannot be written without scrolling.
            text = cut(line.text, columns - 1) if at == lines - 1 else line.text
            self._window.addnstr(at, 0, text, columns, self._styles[line.style])
        self._window.refresh()
