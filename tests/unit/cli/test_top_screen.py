"""The terminal of `kvpool top`, in a pseudo-terminal: drawn, resized, sorted, quit, and the terminal left as it was."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from tests.fixtures.patience import PATIENCE_S

# One view, and later a trouble; all else is what the command does.
SCRIPT = """
from kvpool_cli.top_screen import show
from tests.unit.cli.test_top import many
news = [many(64), "the index does not answer"]
show(lambda timeout_s: news.pop(0) if news else None, "state")
print("left in order")
"""
DEADLINE_S = PATIENCE_S


class Terminal:
    """A process in a pseudo-terminal of 80x24."""

    def __init__(self, term: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(80, 24)
        environment = os.environ | {"TERM": term, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment.pop("LINES", None)
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        self.seen = b""

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: bytes) -> None:
        self.seen = b""
        os.write(self.master, keys)

    def shows(self, part: bytes) -> bool:
        """Read until it is there. False if the process ends, or the time, before it."""
        deadline_s = time.monotonic() + DEADLINE_S
        while part not in self.seen and time.monotonic() < deadline_s:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.master, 65536)
                except OSError:  # the process has ended
                    break
        return part in self.seen


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal("xterm-256color")
    yield opened
    opened.process.kill()
    opened.process.wait()
    os.close(opened.master)


def test_it_is_drawn_resized_sorted_and_left(terminal: Terminal) -> None:
    assert terminal.shows(b"the index does not answer"), "news of trouble stand below the last view"
    assert b"kvpool top" in terminal.seen and b"HOT CHAIN" in terminal.seen and b"TOKENS/s" not in terminal.seen
    terminal.resize(160, 50)
    terminal.process.send_signal(signal.SIGWINCH)
    assert terminal.shows(b"TOKENS/s")
    terminal.type(b"s")
    assert terminal.shows(b"HOST*")
    terminal.type(b"q")
    assert terminal.shows(b"left in order")
    assert terminal.process.wait(DEADLINE_S) == 0


def test_a_terminal_that_cannot_be_drawn_on_is_refused_with_what_to_do() -> None:
    terminal = Terminal("dumb")
    assert terminal.shows(b"--once")
    assert terminal.process.wait(DEADLINE_S) == 1
    os.close(terminal.master)
