"""What an import refuses before it stores anything, and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.client.index import OpenedKeyspace
from kvpool.core.errors import ExportRefused
from kvpool.core.export_format import End, mac_of
from kvpool.core.grid import ShardGrid
from kvpool_cli.import_pages import check_ours
from kvpool_cli.main import run_command as main
from tests.unit.cli.exported import HASH_KEY, MANIFEST, SPEC, write_file

DIGEST = b"d" * 32
END = End(chunk_count=1, pages_bytes=2, digest=DIGEST, mac=mac_of(HASH_KEY, DIGEST, 1, 2))
OPENED = OpenedKeyspace(keyspace=MANIFEST.keyspace, hash_key=HASH_KEY, grid=ShardGrid.of(SPEC), created=False)


def test_a_file_of_ours_is_taken() -> None:
    check_ours(MANIFEST, END, OPENED)


@pytest.mark.parametrize(
    ("end", "opened", "said"),
    [
        (END, replace(OPENED, keyspace=b"x" * 16), "tenant 'default'"),
        (END, replace(OPENED, hash_key=b"x" * 32), "another tenant secret"),
        (replace(END, mac=bytes(32)), OPENED, "forged"),
        (replace(END, chunk_count=2), OPENED, "forged"),
    ],
)
def test_a_file_of_others_is_refused(end: End, opened: OpenedKeyspace, said: str) -> None:
    with pytest.raises(ExportRefused, match=said):
        check_ours(MANIFEST, end, opened)


def test_a_file_is_verified_without_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.kvpx"
    digest = write_file(path, 3).hex()
    assert main(["cache", "import", "--verify-only", str(path), "--json", "--digest", digest.upper()]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["chunks"] == 3 and document["digest"] == digest and document["stored_chunks"] == 0
    assert main(["cache", "import", "--verify-only", str(path)]) == 0
    assert "3 chunks" in capsys.readouterr().out
    assert main(["cache", "import", "--verify-only", str(path), "--digest", "00"]) == 1
    assert "not the one that was named" in capsys.readouterr().err
    # A script's variable that was never set must not switch the comparison off.
    assert main(["cache", "import", "--verify-only", str(path), "--digest", ""]) == 2
    assert "--digest is empty" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["cache", "import", "--verify-only", str(path)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "cut off" in lines[0]
    assert main(["cache", "import", str(path), "--copies", "17"]) == 2
