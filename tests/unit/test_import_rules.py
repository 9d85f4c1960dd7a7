"""Who may import what, kept over the import graph as the standard library's ast reads it.

The table is the one of CONTRIBUTING.md. A module that matches no row is an error: a new part of the house gets a row.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.import_rules import IMPURE, NOWHERE, ONLY_IN_TESTS, SERVICES, Rule, all_rules

REPOSITORY = Path(__file__).resolve().parents[2]
# Where import roots lie; what is found below them is named from there.
SOURCE_ROOTS = ("clients/python", "services/common", "services/index", "services/pagestore", "services/gpuagent", ".")
# Packages of the root "." that are looked at.
WORKSHOP = ("bench", "demo", "tests", "tools")


@dataclass(frozen=True, slots=True)
class Import:
    """One import as written: what it names, where, and whether importing the module runs it."""

    target: str
    line: int
    inside_function: bool


def covers(name: str, target: str) -> bool:
    """Whether target is the module `name` or lies below it."""
    return target == name or target.startswith(f"{name}.")


def row_of(module: str, rules: Mapping[str, Rule]) -> str | None:
    """The most specific row for a module; None if there is none."""
    fits = [row for row in rules if module in (row, row.removesuffix(".*")) or is_prefix(row, module)]
    return max(
        fits, key=lambda row: (len(row.removesuffix("*").removesuffix(".")), not row.endswith("*")), default=None
    )


def is_prefix(row: str, module: str) -> bool:
    """Whether the row ends in a star and the module begins as the row does."""
    return row.endswith("*") and module.startswith(row[:-1])


def imports_of(tree: ast.AST, modules: frozenset[str], *, inside_function: bool = False) -> Iterator[Import]:
    """Every import statement below the node. `from a import b` names a.b if that is a module of ours, else a."""
    for node in ast.iter_child_nodes(tree):
        inside = inside_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        # What stands under `if TYPE_CHECKING:` is never run, like a function that is never called.
        inside |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in modules else base, node.lineno, inside)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                Import(str(arg.value), node.lineno, inside) for arg in node.args if isinstance(arg, ast.Constant)
            )
        yield from imports_of(node, modules, inside_function=inside)


def complaint(found: Import, row: str, rules: Mapping[str, Rule]) -> str | None:
    """Why the row forbids this import; None if it does not."""
    rule, target, top = rules[row], found.target, found.target.partition(".")[0]
    if top in NOWHERE:
        return "is allowed nowhere"
    if target.startswith("."):
        return "is relative"
    if covers(ONLY_IN_TESTS, target) and not row.startswith(("tests.", ONLY_IN_TESTS)):
        return "is for tests only"
    if rule.free or target == "kvpool" or row_of(target, rules) == row:
        return None
    if top in sys.stdlib_module_names:
        return "is not pure" if rule.pure and top in IMPURE and top not in rule.impure_exceptions else None
    if any(covers(name, target) for name in rule.may_import + rule.one_of):
        return None
    if any(covers(name, target) for name in rule.inside_functions):
        return None if found.inside_function else "may be imported inside functions only"
    return "is not in its row"


def violations(sources: Mapping[str, str]) -> list[str]:
    """One line for each broken rule in the given modules (dotted name to source text)."""
    rules, modules, lines = all_rules(), frozenset(sources), []
    for module, source in sorted(sources.items()):
        row = row_of(module, rules)
        if row is None:
            lines.append(f"{module}: no row of the table covers it")
            continue
        rule, tree = rules[row], ast.parse(source)
        imports = list(imports_of(tree, modules))
        for found in imports:
            if why := complaint(found, row, rules):
                lines.append(f"{module}:{found.line}: {found.target} {why} ({row})")
        drivers = {name for name in rule.one_of if any(covers(name, found.target) for found in imports)}
        if len(drivers) > 1:
            lines.append(f"{module}: more than one of {', '.join(sorted(drivers))} ({row})")
        if rule.pure:
            lines += [f"{module}:{line}: {what} is not pure ({row})" for line, what in impure_uses(tree)]
    return lines


def impure_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Ways to the world that need no import of their own."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("open", "print", "input")
        ):
            yield node.lineno, f"{node.func.id}()"
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("np.random", "numpy.random"):
            yield node.lineno, "numpy.random"
        if isinstance(node, ast.AsyncFunctionDef):
            yield node.lineno, "async def"


def read_sources() -> dict[str, str]:
    """Every module of the repository by its dotted name."""
    sources = {}
    for root in SOURCE_ROOTS:
        base = REPOSITORY / root
        for package in WORKSHOP if root == "." else sorted(path.name for path in base.iterdir() if path.is_dir()):
            for path in sorted((base / package).rglob("*.py")):
                name = ".".join(path.relative_to(base).with_suffix("").parts)
                sources[name.removesuffix(".__init__")] = path.read_text()
    return sources


@pytest.mark.slow
def test_the_repository_keeps_the_rules() -> None:
    sources = read_sources()
    assert {"kvpool.core", "kvpool_server", *SERVICES, "tests.unit.test_import_rules"} <= set(sources)
    broken = violations(sources)
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("kvpool.core.keys", "import time", "kvpool.core.keys:1: time is not pure"),
        ("kvpool.core.keys", "from asyncio import Queue", "asyncio is not pure"),
        ("kvpool.core.keys", "import numpy as np\nx = np.random.rand()", "kvpool.core.keys:2: numpy.random"),
        ("kvpool.core.keys", "def f():\n    return open('x')", "open() is not pure"),
        ("kvpool.core.keys", "from kvpool.wire import convert", "kvpool.wire.convert is not in its row"),
        ("kvpool.core.keys", "from kvpool import wire", "kvpool.wire is not in its row"),
        ("kvpool.core.keys", "import torch", "torch is not in its row"),
        ("kvpool.client.pool", "import kvpool_server.config", "is not in its row"),
        ("kvpool.client.pool", "from kvpool.testing import ManualClock", "is for tests only"),
        ("kvpool.connectors.transformers", "import torch", "inside functions only"),
        ("kvpool.connectors.vllm", "if True:\n    from vllm import LLM", "kvpool.connectors.vllm:2: vllm may be"),
        ("kvpool_cli.up", "from kvpool_index import main", "kvpool_index.main is not in its row"),
        ("kvpool_cli.up", "import importlib\nimportlib.import_module('kvpool_index.main')", "is not in its row"),
        ("kvpool.novelty", "", "no row of the table covers it"),
        ("kvpool_router.main", "", "no row of the table covers it"),
        ("kvpool_index.engine", "import kvpool_pagestore.core", "is not in its row"),
        ("kvpool_index.engine", "from kvpool_index.adapters import memory", "is not in its row"),
        ("kvpool_index.core.match", "from kvpool_index.ports import Store", "is not in its row"),
        ("kvpool_index.core.match", "async def f(): ...", "async def is not pure"),
        ("kvpool_pagestore.adapters.page_store", "import rocksdict\nimport kvpool.client", "more than one of"),
        ("kvpool_pagestore.servicer", "import pickle", "is allowed nowhere"),
        ("kvpool_gpuagent.kernels.gather", "import kvpool.core", "is not in its row"),
        ("kvpool.client.gpu", "import torch", "inside functions only"),
        ("kvpool_gpuagent.engine.agent", "from . import ports", "is relative"),
        ("demo.run", "import kvpool.testing", "is for tests only"),
    ],
)
def test_a_planted_violation_is_caught(module: str, source: str, expected: str) -> None:
    around = dict.fromkeys(
        ("kvpool.wire", "kvpool.wire.convert", "kvpool_index.main", "kvpool_index.adapters.memory"), ""
    )
    lines = violations(around | {module: source})
    assert len(lines) == 1
    assert expected in lines[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvpool.core.clock", "import time"),
        ("kvpool.core.keys", "import struct, numpy, blake3\nfrom kvpool.core.errors import KvPoolError"),
        (
            "kvpool.connectors.transformers",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    from transformers import Cache",
        ),
        ("kvpool_cli", "from kvpool import __version__"),
        (
            "kvpool_index.servicer_watch",
            "import grpc\nfrom kvpool_index import engine\nfrom kvpool.v1 import index_pb2",
        ),
        ("kvpool.connectors.transformers", "def load():\n    import torch\n    from transformers import DynamicCache"),
        ("kvpool_index.adapters.redis", "import asyncio\nimport redis.asyncio\nfrom kvpool_index.ports import Store"),
        ("kvpool_index.main", "from kvpool_index.adapters import redis\nfrom kvpool_server.config import load"),
        ("kvpool_pagestore.flushing", "import asyncio\nfrom kvpool_pagestore.core import ledger"),
        ("kvpool.client.gpu_events", "import kvpool.cuda.ipc\ndef f():\n    import torch"),
        ("tests.e2e.test_up", "import kvpool.testing, kvpool_index.engine, psutil"),
    ],
)
def test_what_the_table_allows_passes(module: str, source: str) -> None:
    assert violations({module: source}) == []
