"""Links between the repository's documents lead somewhere: the file is there, and so is the heading."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
_TEST = re.compile(r"`((?:tests/)?[\w/]+\.py)::(\w+)`")
_RUNBOOK = re.compile(r"docs/[a-z0-9-]+\.md#[\w-]+")


def _documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).exists()]


def links_of(text: str) -> list[str]:
    """What a document links to, without what stands in code."""
    return _LINK.findall(_CODE.sub("``", _FENCE.sub("", text)))


def anchors_of(text: str) -> set[str]:
    """Anchors of a document's headings, as GitHub makes them."""
    counts: Counter[str] = Counter()
    anchors = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
        counts[slug] += 1
    return anchors


@lru_cache(maxsize=256)
def _anchors(path: Path) -> frozenset[str]:
    return frozenset(anchors_of(path.read_text()))


def broken(document: Path, link: str) -> str:
    """What is wrong with a link; empty if nothing is, or if it leads out of the repository."""
    if re.match(r"[a-z][a-z0-9+.-]*:", link):
        return ""
    name, _, anchor = link.partition("#")
    target = (document.parent / unquote(name)).resolve() if name else document
    if not target.exists():
        return f"{link}: no such file"
    if ROOT not in (target, *target.parents):
        return f"{link}: leads out of the repository"
    if anchor and target.suffix == ".md" and anchor not in _anchors(target):
        return f"{link}: no such heading"
    return ""


@pytest.mark.parametrize("document", _documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    assert [found for link in links_of(document.read_text()) if (found := broken(document, link))] == []


def test_alerts_lead_to_headings_of_the_runbook() -> None:
    links = _RUNBOOK.findall((ROOT / "k8s/alerts/kvpool.rules.yml").read_text())
    assert links
    assert [found for link in links if (found := broken(ROOT / "README.md", link))] == []


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: str(path.name))
def test_a_test_that_a_document_names_is_there(document: Path) -> None:
    for name, test in _TEST.findall(document.read_text()):
        file = ROOT / "tests" / name.removeprefix("tests/")
        assert file.exists() and re.search(rf"^(async )?def {test}\(", file.read_text(), re.MULTILINE), (
            f"{name}::{test}"
        )


def test_what_is_a_link_and_what_is_not() -> None:
    text = "[a](b.md#c) `[no](x.md)`\n```\n[no](y.md)\n# no\n```\n# One `two` (three)!\n## Same\n## Same\n[d](<e.md>)"
    assert links_of(text) == ["b.md#c", "e.md"]
    assert anchors_of(text) == {"one-two-three", "same", "same-1"}
    assert broken(ROOT / "README.md", "no-such.md") and broken(ROOT / "README.md", "#no-such")
    assert not broken(ROOT / "README.md", "https://example.com/x.md#y") and not broken(ROOT / "README.md", "docs/")
