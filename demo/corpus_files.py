"""The carried text: where the files are and what they must contain."""

from __future__ import annotations

import hashlib
from pathlib import Path

CORPUS_DIR = Path(__file__).resolve().parent / "corpus"
MANIFEST_PATH = CORPUS_DIR / "SHA256SUMS"


def read_manifest() -> dict[str, str]:
    """SHA-256 (hex) by file name, from SHA256SUMS (the format of sha256sum)."""
    digest_by_name: dict[str, str] = {}
    for line in MANIFEST_PATH.read_text(encoding="ascii").splitlines():
        digest, name = line.split("  ", maxsplit=1)
        digest_by_name[name] = digest
    return digest_by_name


def corpus_paths() -> list[Path]:
    """The text files of the corpus, sorted by name."""
    return [CORPUS_DIR / name for name in sorted(read_manifest())]


def read_corpus_file(name: str) -> str:
    """The text of one corpus file.

    Raises ValueError when its content is not what the manifest says: prompts, and with them every figure of the demo,
    would silently differ.
    """
    content = (CORPUS_DIR / name).read_bytes()
    expected = read_manifest().get(name)
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(f"demo/corpus/{name} has SHA-256 {found}, the manifest says {expected}; restore the file")
    return content.decode("utf-8")
