"""The terminal of `kvpool top`: drawn by rich, with keys that scroll and sort."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live

from kvpool_cli.errors import CommandFailed
from kvpool_cli.output import line
from kvpool_cli.top_render import BAD, SORTS, render
from kvpool_cli.top_view import View

_KEY_WAIT_S = 0.1
_QUIT = {"q", "Q", "\x1b"}
_STEPS = {"\x1b[A": -1, "\x1b[B": 1, "\x1bOA": -1, "\x1bOB": 1}
_PAGES = {"\x1b[5~": -1, "\x1b[6~": 1}
_HOME = ("\x1b[H", "\x1bOH", "\x1b[1~")


def show(next_view: Callable[[float], View | str | None], sort: str) -> None:
    """Draw what `next_view` gives until q is pressed. Raises CommandFailed for a terminal that cannot be drawn on."""
    console = Console(markup=False, emoji=False, highlight=False)
    if console.is_dumb_terminal:
        raise CommandFailed(f"TERM is {os.environ.get('TERM', '')!r}; set TERM=xterm-256color, or give --once")
    screen = _Screen(console, next_view, sort)
    with _keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        screen.run(live)


@contextmanager
def _keys() -> Iterator[None]:
    """Keys are read one by one and not echoed."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Screen:
    def __init__(self, console: Console, next_view: Callable[[float], View | str | None], sort: str) -> None:
        self._console = console
        self._next_view = next_view
        self._sort = sort
        self._view: View | None = None
        self._problem = "looking ..."
        self._first_host = 0

    def run(self, live: Live) -> None:
        drawn_size = None
        changed = True
        while True:
            if changed or drawn_size != self._console.size:
                drawn_size = self._console.size
                live.update(self._drawn(), refresh=True)
            news = self._next_view(0.0)
            if isinstance(news, View):
                self._view, self._problem = news, ""
            elif news is not None:
                self._problem = news
            key = _read_key()
            if key in _QUIT:
                return
            changed = self._on_key(key) or news is not None

    def _on_key(self, key: str) -> bool:
        """Whether it changed what is shown."""
        steps = _STEPS.get(key, 0) + _PAGES.get(key, 0) * (self._console.height // 2)
        if key in _HOME:
            self._first_host = 0
        elif steps:
            most = len(self._view.hosts) if self._view is not None else 0
            self._first_host = max(0, min(most, self._first_host + steps))
        elif key == "s":
            self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]
        else:
            return False
        return True

    def _drawn(self) -> Group:
        columns, lines = self._console.size
        problem = [line(self._problem, BAD)] if self._problem else []
        if self._view is None:
            return Group(*problem)
        drawn = render(
            self._view,
            columns=columns,
            lines=lines - len(problem),
            sort=self._sort,
            first_host=self._first_host,
            clock=time.strftime("%H:%M:%S"),
        )
        return Group(drawn, *problem)


def _read_key() -> str:
    """A key, or the sequence of one; empty if none is pressed."""
    if not select.select([sys.stdin], [], [], _KEY_WAIT_S)[0]:
        return ""
    return os.read(sys.stdin.fileno(), 16).decode(errors="replace")
