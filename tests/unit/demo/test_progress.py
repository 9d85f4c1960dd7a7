"""A bar on a terminal, lines elsewhere."""

import io

from demo.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(2, stream)
    progress.phase("cold")
    progress.step("turn 1")
    progress.step("turn 2")
    progress.close()
    assert stream.getvalue() == "cold\n  [1/2] turn 1\n  [2/2] turn 2\n"


def test_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    progress = Progress(2, stream)
    progress.phase("cold")
    progress.step("turn 1")
    progress.step("turn 2")
    progress.close()
    assert "cold" in stream.getvalue()
    assert "\r" in stream.getvalue()
