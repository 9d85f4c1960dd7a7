"""What no connector, command or RPC leads to is deleted: every name that shipped code defines is used by shipped code.

Names are compared as words, so a use of any name of that spelling counts, as does a string that holds it. That misses
some dead code and reports no live code.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = ("clients/python/kvpool", "clients/python/kvpool_cli", "services")
NOT_SHIPPED_CODE = ("kvpool/testing", "kvpool/v1", "node_modules")

# Called by the code of others: engines call what they load as a plugin.
CALLED_BY_ENGINES = "kvpool/connectors/"

UNUSED_ON_PURPOSE: Mapping[str, str] = {
    "kvpool/client/paged_cache.py:PagedCache.": "public API: docs/python-client.md presents it",
    "kvpool/core/reference.py": "what kernels are compared with",
    "kvpool/core/codecs.py:error_bound": "what codecs promise, and are held to",
    "kvpool/core/codecs.py:rms_error_bound": "what codecs promise, and are held to",
    "kvpool/core/fault_points.py:disarm_all": "fault points are for tests",
    "kvpool_gpuagent/kernels/": "a reference beside each kernel, with which tests compare it",
    "kvpool_server/config.py:option_texts": "docs/configuration.md is made of it",
    "kvpool_server/fds.py:FdServer.connection_count": "seen by tests: how many connections are held",
    "kvpool_server/fds.py:PeerCredentials.gid": "one of the three numbers that the kernel gives",
    "kvpool_cli/lazy.py:_Described.get_help_option_names": "typer calls it",
    "kvpool_cli/lazy.py:_Described.get_short_help_str": "typer calls it",
    "kvpool_cli/output.py:as_text": "the tables of bench/ and demo/",
    "kvpool_index/core/entries.py:encode_entry": "what decode_value reads, for tests and bench/",
    "kvpool_server/node/chunk_directory.py:FixedLocations": "what a node of a test or a bench announces",
    "kvpool_pagestore/core/page_table.py:PageTable.ready_pages": "what models and the simulator compare with",
}

# Bases that call nothing by themselves; methods of classes with other bases from outside may be called by those.
PASSIVE_BASES = {"ABC", "Exception", "Generic", "Protocol"}

WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")


def base_names(node: ast.ClassDef) -> set[str]:
    """The bases as written, without their parameters: `asyncio.Protocol` is not typing's `Protocol`."""
    return {ast.unparse(base).partition("[")[0] for base in node.bases}


def is_docstring(node: ast.stmt) -> bool:
    """Also of an attribute: a string that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def uses(tree: ast.AST) -> Iterator[str]:
    """Every name that is read, and every word of a string that is not a docstring."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt) and is_docstring(node):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.MatchClass):
            yield from node.kwd_attrs
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from WORD.findall(node.value)
        yield from uses(node)


def definitions(body: list[ast.stmt], classes: set[str], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Full name and last word of functions, classes, methods, constants and fields."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if not any("register" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield prefix + node.name, node.name
        elif isinstance(node, ast.ClassDef):
            yield prefix + node.name, node.name
            if not base_names(node) - classes - PASSIVE_BASES:
                yield from definitions(node.body, classes, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, target.id


def unreached(sources: Mapping[str, str]) -> list[str]:
    """`path:name` of what these modules define and never use."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    used = Counter(word for tree in trees.values() for word in uses(tree))
    classes = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return [
        f"{path}:{name}"
        for path, tree in sorted(trees.items())
        for name, word in definitions(tree.body, classes)
        if not used[word] and not word.startswith("__")
    ]


def read_sources() -> dict[str, str]:
    """Modules that users get, named from their package."""
    found = {}
    for root in ROOTS:
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            name = path.relative_to(REPOSITORY).as_posix()
            name = name[name.index("kvpool") :]
            if not any(part in name for part in NOT_SHIPPED_CODE):
                found[name] = path.read_text()
    return found


def excuse(name: str) -> str | None:
    """The exception that covers a name: the name itself, or a module or folder that it begins with."""
    return next((known for known in UNUSED_ON_PURPOSE if name.startswith(known)), None)


@pytest.mark.slow
def test_shipped_code_is_reached_by_shipped_code() -> None:
    found = [name for name in unreached(read_sources()) if not name.startswith(CALLED_BY_ENGINES)]
    strangers = [name for name in found if excuse(name) is None]
    assert not strangers, "delete these with their tests, or name their user:\n" + "\n".join(strangers)
    stale = UNUSED_ON_PURPOSE.keys() - {excuse(name) for name in found}
    assert not stale, f"these are reached or gone and need no exception: {sorted(stale)}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def used(): ...\nused()", []),
        ("def unused(): ...", ["m.py:unused"]),
        ("class Port(Protocol):\n    def unused(self): ...\nPort", ["m.py:Port.unused"]),
        ("class Handler(http.Handler):\n    def do_GET(self): ...\nHandler", []),
        ("class Slot:\n    unread: int = 0\nslot = Slot()\nslot.unread = 1\nslot", ["m.py:Slot.unread"]),
        ("def by_name(): ...\ngetattr(here, 'by_name')", []),
        ("def described():\n    '''described'''", ["m.py:described"]),
    ],
)
def test_what_counts_as_a_use(source: str, expected: list[str]) -> None:
    assert unreached({"m.py": source}) == expected
