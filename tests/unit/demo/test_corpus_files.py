from pathlib import Path

import pytest

from demo import corpus_files
from demo.corpus_files import CORPUS_DIR, read_corpus_file, read_manifest


def test_manifest_lists_every_text_file_and_no_other() -> None:
    assert set(read_manifest()) == {path.name for path in CORPUS_DIR.glob("*.txt")}


@pytest.mark.parametrize("name", sorted(read_manifest()))
def test_file_is_what_the_manifest_says_and_has_a_source(name: str) -> None:
    text = read_corpus_file(name)  # raises when its SHA-256 differs
    assert text.endswith("\n")
    assert "\r" not in text
    assert f"`{name}`" in (CORPUS_DIR / "README.md").read_text(encoding="utf-8")


def test_changed_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("changed\n")
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  a.txt\n")
    monkeypatch.setattr(corpus_files, "CORPUS_DIR", tmp_path)
    monkeypatch.setattr(corpus_files, "MANIFEST_PATH", tmp_path / "SHA256SUMS")
    with pytest.raises(ValueError, match=r"a\.txt has SHA-256"):
        read_corpus_file("a.txt")
