"""The benches run, on the smallest amounts, and compare what they moved: their figures are not looked at."""

import pytest

from bench.match import AT_ONCE, BUSY_CHUNKS, CHUNK_COUNTS, REPLICA_CHUNKS, measure_matches
from bench.pages import PagesPlan, measure_pages

pytestmark = pytest.mark.e2e


def test_pages_of_every_way_arrive() -> None:
    document = measure_pages(None, PagesPlan(chunks=2, rounds=1, disk_chunks=8, disk_rounds=1)).document()
    for name in (
        *("arena put, contiguous tensor", "arena get, contiguous tensor", "arena get, 16-token blocks"),
        *("stream write", "stream read", "disk put, until durable", "disk get, cold"),
    ):
        case = document[name]
        assert case["unit"] == "GB/s"
        assert case["value"] > 0 and case["baseline"] > 0 and case["ratio"] > 0, name


def test_matches_of_every_length_are_found() -> None:
    document = measure_matches(None, 5).document()
    lengths = [f"match {count} chunks" for count in CHUNK_COUNTS] + [f"match {REPLICA_CHUNKS} chunks from a replica"]
    busy = f"matches of {BUSY_CHUNKS} chunks, {AT_ONCE} at once"
    assert set(document) == {busy} | {f"{length}, {part}" for length in lengths for part in ("p50", "p99")}
    assert all(case["unit"] == ("1/s" if name == busy else "ms") for name, case in document.items())
    assert all(case["value"] > 0 for case in document.values())
