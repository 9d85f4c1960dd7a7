"""The RocksDB tier after kills and damage: what was durable is there, what is damaged costs itself alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.core.errors import PageCorrupt
from tests.unit.pagestore.rocks_pages import PAGE_BYTES, get, key, opened, page, page_write, put, scanned


@pytest.fixture(params=["extents", "tables"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ---- kills

WRITER = """
import sys
from pathlib import Path
from tests.unit.pagestore.rocks_pages import opened, page_write
store = opened(Path(sys.argv[1]), sys.argv[2])
store.save_value("incarnation", b"41")
for start in range(0, 100_000, 4):
    store.put_batch([page_write(n) for n in range(start, start + 4)], lambda key, failure: failure or print(
        int.from_bytes(key.chunk_hash, "big"), flush=True))
    if start:
        store.delete_batch([page_write(start - 1).key])
"""


@pytest.mark.parametrize("lines", [1, 41, 90])
def test_what_was_durable_is_there_after_a_kill(tmp_path: Path, way: str, lines: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "disk"), way]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}) as process:
        assert process.stdout is not None
        durable = [int(process.stdout.readline()) for _ in range(lines)]
        process.kill()
        durable += [int(line) for line in process.stdout if line.endswith(b"\n")]
    store = opened(tmp_path / "disk", way)
    last = max(durable)
    for number in durable:
        found = get(store, number)
        if number % 4 == 3 and number < last:
            assert found in (None, page(number))  # it may have been deleted
        else:
            assert found == page(number)
    assert {number for number in durable if number % 4 != 3} <= scanned(store) <= set(range(last + 5))
    assert store.load_value("incarnation") == b"41"
    assert list((tmp_path / "disk").glob("incoming/*")) == []
    store.close()


# ---- damage


def file_with(directory: Path, content: bytes) -> Path:
    """The table or volume file that holds some bytes."""
    paths = [*directory.glob("*.sst"), *directory.glob("extents/*.pages")]
    return next(path for path in paths if content in path.read_bytes())


def flip(path: Path, content: bytes, at: int = 0) -> None:
    """One bit of a file, so many bytes behind where some content begins."""
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(content) + at] ^= 1
    path.write_bytes(damaged)


def test_a_flipped_byte_is_damage_or_reaches_the_reader_whose_sums_catch_it(tmp_path: Path, way: str) -> None:
    store = opened(tmp_path, way)
    put(store, 1, 2, 3)
    store.close()
    flip(file_with(tmp_path, page(2)[:4000]), page(2)[:4000], 100_000)
    store = opened(tmp_path, way)
    if way == "extents":
        found = get(store, 2)
        assert found is not None and found != page(2) and len(found) == PAGE_BYTES
    else:
        with pytest.raises(PageCorrupt):
            get(store, 2)
    assert (get(store, 1), get(store, 3)) == (page(1), page(3))
    put(store, 2)
    assert get(store, 2) == page(2)
    store.close()


@pytest.mark.parametrize("harm", ["cut", "zeroed", "removed", "noise"])
def test_a_ruined_table_costs_its_own_pages_and_nothing_else(tmp_path: Path, harm: str) -> None:
    store = opened(tmp_path, "tables", volume_bytes=PAGE_BYTES)  # every batch gets a volume of its own
    put(store, 1, 2)
    put(store, 3, 4)
    store.close()
    ruined = file_with(tmp_path, page(3)[:4000])
    size_bytes = ruined.stat().st_size
    if harm == "removed":
        ruined.unlink()
    elif harm == "cut":
        os.truncate(ruined, size_bytes // 2)
    else:
        ruined.write_bytes(bytes(size_bytes) if harm == "zeroed" else os.urandom(size_bytes))
    store = opened(tmp_path, "tables")
    assert (get(store, 1), get(store, 2)) == (page(1), page(2))
    for number in (3, 4):
        with contextlib.suppress(PageCorrupt):
            assert get(store, number) != page(number) or (harm == "cut" and number == 3)
    store.delete_batch([key(3), key(4)])
    put(store, 3, 5)
    assert (get(store, 3), get(store, 4), get(store, 5)) == (page(3), None, page(5))
    assert scanned(store) == {1, 2, 3, 5}
    store.close()
    store = opened(tmp_path, "tables")
    assert (get(store, 1), get(store, 3), get(store, 5)) == (page(1), page(3), page(5))
    store.close()


def test_damaged_records_cost_their_own_pages_and_nothing_else(tmp_path: Path) -> None:
    store = opened(tmp_path, "tables")
    for start in range(0, 400, 100):
        pages = [page_write(number, b"small page %d" % number) for number in range(start, start + 100)]
        store.put_batch(pages, lambda page_key, failure: None)
    store.close()
    opened(tmp_path, "tables").close()  # turns the log into tables
    records = file_with(tmp_path, b"p" * 16 + (5).to_bytes(8, "little"))
    damaged = bytearray(records.read_bytes())
    at = damaged.index(b"p" * 16 + (5).to_bytes(8, "little"))
    damaged[at] ^= 1
    records.write_bytes(damaged)
    store = opened(tmp_path, "tables")
    survivors = scanned(store)
    assert 5 not in survivors and len(survivors) >= 300
    assert all(get(store, number) == b"small page %d" % number for number in survivors)
    assert get(store, 5) is None
    put(store, 5)
    store.close()
    store = opened(tmp_path, "tables")
    assert scanned(store) == survivors | {5}
    store.close()
