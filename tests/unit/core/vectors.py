"""The test vectors under proto/, which other languages implement too."""

import json
from pathlib import Path
from typing import Any

TESTDATA = Path(__file__).resolve().parents[3] / "proto" / "testdata"


def load_vectors(name: str) -> list[dict[str, Any]]:
    vectors: list[dict[str, Any]] = json.loads((TESTDATA / name).read_text())["vectors"]
    assert vectors
    return vectors
