"""A module has one job and a function fits one screen; generated code has its own measure."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PLACES = ("clients", "services", "tests", "tools", "demo", "bench")
GENERATED = REPOSITORY / "clients/python/kvpool/v1"
MODULE_LINES = 600
FUNCTION_LINES = 80


def oversized(name: str, source: str) -> Iterator[str]:
    """One line for the module if it is too long, and one for each function that is."""
    if (count := len(source.splitlines())) > MODULE_LINES:
        yield f"{name}: {count} lines, at most {MODULE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {count} lines, at most {FUNCTION_LINES}"


@pytest.mark.slow
def test_modules_and_functions_stay_small() -> None:
    paths = [path for place in PLACES for path in sorted((REPOSITORY / place).rglob("*.py"))]
    assert Path(__file__).resolve() in paths
    ours = (path for path in paths if GENERATED not in path.parents)
    broken = [line for path in ours for line in oversized(str(path.relative_to(REPOSITORY)), path.read_text())]
    assert not broken, "\n".join(broken)


def test_what_has_outgrown_is_named() -> None:
    function = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
    assert list(oversized("a.py", function)) == [f"a.py:1: f has {FUNCTION_LINES + 1} lines, at most {FUNCTION_LINES}"]
    assert list(oversized("a.py", "x = 1\n" * MODULE_LINES)) == []
    assert list(oversized("a.py", "x = 1\n" * (MODULE_LINES + 1))) == [
        f"a.py: {MODULE_LINES + 1} lines, at most {MODULE_LINES}"
    ]
