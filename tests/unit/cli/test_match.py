"""Reading tokens, and telling tiers."""

import io
from pathlib import Path

import pytest

from kvpool.core.cluster import Location, NodeInfo, NodeKind
from kvpool.core.coverage import Coverage
from kvpool.core.grid import ShardGrid
from kvpool.core.outcome import Tier
from kvpool_cli.errors import CommandFailed
from kvpool_cli.match import Found, FoundRun, best_tier, render, to_document
from kvpool_cli.output import as_text
from kvpool_cli.prompts import read_tokens

NODE = NodeInfo(node_id=b"n" * 16, kind=NodeKind.PAGESTORE, host_id="host-0")


def place(tier: Tier, shards: int) -> Location:
    return Location(node_id=NODE.node_id, incarnation=1, tier=tier, shards=shards)


@pytest.mark.parametrize("text", ["[1, 2, 3]", " [1,2,3]\n", "1 2 3", "1\n2\n\t3\n"])
def test_tokens_are_json_or_blank_separated(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokens").write_text(text)
    assert read_tokens(str(tmp_path / "tokens")) == [1, 2, 3]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert read_tokens("-") == [1, 2, 3]


@pytest.mark.parametrize("text", ["[1, 2", "1 two", "[1.5]", "[true]", '["1"]', "-1", "4294967296", "[[1]]"])
def test_what_is_no_token_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(CommandFailed):
        read_tokens(str(tmp_path / "tokens"))
    with pytest.raises(CommandFailed, match="cannot be read"):
        read_tokens(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("places", "tier"),
    [
        ([place(Tier.STAGING, 3)], Tier.STAGING),
        ([place(Tier.STAGING, 1), place(Tier.STAGING, 2)], Tier.STAGING),
        ([place(Tier.STAGING, 1), place(Tier.DISK, 2)], Tier.DISK),
        ([place(Tier.DISK, 3), place(Tier.STAGING, 7)], Tier.STAGING),
        ([place(Tier.GPU, 1), place(Tier.STAGING, 2), place(Tier.DISK, 3)], Tier.STAGING),
    ],
)
def test_the_tier_of_a_chunk_is_that_of_its_slowest_shard(places: list[Location], tier: Tier) -> None:
    assert best_tier(places, Coverage.of(ShardGrid(2, 1, 2, (1,)), 0)) is tier


@pytest.mark.parametrize(
    ("places", "tier"),
    [
        ([place(Tier.STAGING, 0b110), place(Tier.DISK, 0b001)], Tier.STAGING),
        ([place(Tier.STAGING, 0b010), place(Tier.DISK, 0b100)], Tier.DISK),
        ([place(Tier.STAGING, 0b010), place(Tier.DISK, 0b001)], Tier.DISK),
    ],
)
def test_pages_of_another_split_count(places: list[Location], tier: Tier) -> None:
    assert best_tier(places, Coverage.of(ShardGrid(1, 2, 1, (1, 2)), 0)) is tier


def test_totals_add_up() -> None:
    found = Found(
        keyspace="k",
        token_count=165,
        chunk_tokens=16,
        chunk_count=10,
        runs=(
            FoundRun(first_chunk=0, chunk_count=3, tier=Tier.STAGING, nodes=(NODE,)),
            FoundRun(first_chunk=3, chunk_count=2, tier=Tier.DISK, nodes=(NODE,)),
        ),
    )
    document = to_document(found)
    assert (document["matched_chunks"], document["matched_tokens"]) == (5, 80)
    assert document["tokens_by_tier"] == {"gpu": 0, "staging": 48, "disk": 32}
    assert [run["first_chunk"] for run in document["runs"]] == [0, 3]
    text = as_text(render(found))
    assert "5 of 10 chunks (80 of 165 tokens)" in text
    rows = {line.rsplit(maxsplit=2)[0]: line.split()[-2:] for line in text.splitlines() if line.startswith("n")}
    assert rows == {"not held": ["5", "80"], "no full chunk": ["-", "5"]}
