"""What an operator does with clusters that run: carry prefixes over, pin, evict, watch, examine."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvpool.client.index import IndexClient, OpenedKeyspace
from kvpool.core.chunks import ROOT_HASH, chunk_hashes, group_head_index
from kvpool.core.cluster import PageMetadata
from kvpool.core.export_format import Manifest, key_check
from kvpool.core.grid import shards_in
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.core.page import HEADER_BYTES, PageKey, page_bytes, seal
from kvpool.testing import eventually_sync
from kvpool_cli.cluster import socket_dir
from kvpool_cli.export_file import ExportWriter
from tests.e2e.cli_cluster import CHUNK_TOKENS, KEYSPACE_NAME, SMALL, TOKENS, Cluster
from tests.fixtures.patience import patient

pytestmark = pytest.mark.e2e

# Chunks of one page of 512 KiB, so that few of them fill a small disk tier.
LARGE = KeyspaceSpec(
    model_id="large", model_revision="1", groups=(KvGroup(16, 1, 128),), dtype=Dtype.BF16, chunk_tokens=64
)
TINY_TIERS = ("--arena-bytes", "16MiB", "--disk-bytes", "64MiB")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two pagestores that hold the chunks of TOKENS."""
    cluster = Cluster(tmp_path_factory.mktemp("old"))
    cluster.run("cluster", "up", "--detach", "--pagestores", "2", *SMALL)
    try:
        cluster.store(TOKENS)
        cluster.run("cache", "flush")
        yield cluster
    finally:
        cluster.run("cluster", "down")


def matching(cluster: Cluster, tokens: str | Path, chunk_count: int) -> dict[str, Any]:
    """What a match returns when it finds just so many chunks; nothing while it does not."""
    found = cluster.json("cache", "match", str(tokens))
    return found if found["matched_chunks"] == chunk_count else {}


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(TOKENS))
    return str(file)


def test_prefixes_are_carried_to_a_fresh_cluster(old: Cluster, tokens: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.kvpx"
    exported = old.json("cache", "export", str(path), "--keyspace", KEYSPACE_NAME)
    assert exported["chunks"] == 4 and exported["missing_chunks"] == 0
    of_tokens = old.json("cache", "export", str(tmp_path / "prefix.kvpx"), tokens)
    assert of_tokens["digest"] == exported["digest"], "the same chunks in the same order"

    fresh = Cluster(tmp_path / "fresh")
    fresh.run("cluster", "up", "--detach", *SMALL)
    try:
        spoilt = bytearray(path.read_bytes())
        spoilt[len(spoilt) // 2] ^= 1
        (tmp_path / "spoilt.kvpx").write_bytes(spoilt)
        assert "refused at byte" in fresh.run("cache", "import", str(tmp_path / "spoilt.kvpx"), code=1)
        assert "known: none" in fresh.run("cache", "match", tokens, code=1), "nothing of it was used"

        imported = fresh.json("cache", "import", str(path), "--digest", exported["digest"])
        assert (imported["stored_chunks"], imported["failed_chunks"]) == (4, 0)
        found = eventually_sync(lambda: matching(fresh, tokens, 4))
        assert found["chunks"] == 4
        report, equal = fresh.load(TOKENS)
        assert report.loaded_chunks == 4 and equal
        again = fresh.json("cache", "import", str(path))
        assert (again["stored_chunks"], again["present_chunks"]) == (0, 4)
        assert [node["failed_pages"] for node in fresh.json("cache", "flush")["nodes"]] == [0]
        (store,) = [node for node in fresh.json("cluster", "status")["nodes"] if node["kind"] == "pagestore"]
        assert store["pages"]["disk"] == 4 and store["pages"]["dirty"] == 0
        assert [node["pages"] for node in fresh.json("cache", "clear", "--yes")["nodes"]] == [4]
    finally:
        fresh.run("cluster", "down")


def opened(cluster: Cluster, name: str, spec: KeyspaceSpec) -> OpenedKeyspace:
    """A keyspace of the cluster, as an engine would open it."""

    async def open_it() -> OpenedKeyspace:
        index = IndexClient(patient(index_endpoints=(cluster.state.of_role("index")[0].endpoints["endpoint"],)))
        try:
            return await index.open_keyspace(name, spec)
        finally:
            await index.close()

    return asyncio.run(open_it())


def write_chain(path: Path, keyspace: OpenedKeyspace, tokens: list[int]) -> None:
    """A file of random but true pages for a token sequence."""
    manifest = Manifest(name="large", tenant="default", spec=LARGE, key_check=key_check(keyspace.hash_key))
    hashes = chunk_hashes(keyspace.hash_key, tokens, LARGE.chunk_tokens)
    writer = ExportWriter(path, manifest)
    for index, chunk_hash in enumerate(hashes):
        pages = []
        for shard in shards_in(manifest.grid.all_shards):
            payload_len = manifest.payload_sizes()[shard]
            page = bytearray(page_bytes(payload_len))
            page[HEADER_BYTES : HEADER_BYTES + payload_len] = random.Random(index).randbytes(payload_len)
            seal(page, PageKey(keyspace.keyspace, chunk_hash, shard), LARGE.codec, payload_len)
            pages.append(page)
        parent = hashes[index - 1] if index else ROOT_HASH
        kept = PageMetadata(parent_hash=parent, chunk_index=index, group_head_hash=hashes[group_head_index(index)])
        writer.add(chunk_hash, kept, manifest.grid.all_shards, pages)
    writer.finish(keyspace.hash_key)
    writer.close()


def test_pinned_chunks_outlive_a_storm_and_a_restart(tmp_path: Path) -> None:
    prompt, other = list(range(8 * 64)), list(range(10_000, 10_000 + 160 * 64))
    for name, sequence in (("prompt", prompt), ("other", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(sequence))
    cluster = Cluster(tmp_path / "cluster")
    cluster.run("cluster", "up", "--detach", "--agents", "0", *TINY_TIERS)
    try:
        keyspace = opened(cluster, "large", LARGE)
        write_chain(tmp_path / "prompt.kvpx", keyspace, prompt)
        write_chain(tmp_path / "other.kvpx", keyspace, other)
        cluster.run("cache", "import", str(tmp_path / "prompt.kvpx"))
        pinned = cluster.json("cache", "pin", str(tmp_path / "prompt.json"), "--for", "1h")
        assert pinned["nodes"][0]["pages"] >= 8
        (group,) = cluster.json("cache", "pins")["groups"]
        assert (group["keyspace"], group["first_chunk"], group["chunks"]) == ("large", 0, 8)
        # More than staging and disk hold: what is not pinned pushes itself out.
        cluster.run("cache", "import", str(tmp_path / "other.kvpx"))
        eventually_sync(lambda: matching(cluster, tmp_path / "prompt.json", 8))
        eventually_sync(lambda: cluster.json("cache", "match", str(tmp_path / "other.json"))["matched_chunks"] < 160)
        cluster.run("cluster", "down")

        cluster.run("cluster", "up", "--detach", "--agents", "0", *TINY_TIERS)
        opened(cluster, "large", LARGE)  # its own Redis keeps nothing: names come back with the first engine
        eventually_sync(lambda: matching(cluster, tmp_path / "prompt.json", 8))
        kept = cluster.json("cache", "evict", str(tmp_path / "prompt.json"), "--yes")["nodes"][0]
        assert kept["evicted_pages"] == 0 and kept["pinned_pages"] == pinned["nodes"][0]["pages"]
        cluster.run("cache", "unpin", str(tmp_path / "prompt.json"))
        tail = ("cache", "evict", str(tmp_path / "prompt.json"), "--from-token", "128")
        would = cluster.json(*tail, "--dry-run")["nodes"][0]
        assert cluster.json(*tail, "--dry-run")["nodes"][0] == would, "nothing has changed"
        gone = cluster.json(*tail, "--yes")["nodes"][0]
        assert gone["evicted_pages"] == would["would_evict_pages"] == pinned["nodes"][0]["pages"] * 6 // 8
        assert would["would_evict_chunks"] == 6 and would["would_free_disk_bytes"] > 0
        eventually_sync(lambda: matching(cluster, tmp_path / "prompt.json", 2))
        cluster.run("cache", "evict", "--keyspace", "large", "--whole-keyspace", "--yes")
        assert cluster.json("cluster", "status")["nodes"][0]["pages"] == {"staging": 0, "dirty": 0, "disk": 0}
    finally:
        cluster.run("cluster", "down")


def test_staging_is_freed_without_a_loss_on_one_node(old: Cluster, tokens: str) -> None:
    cluster = old
    holder = cluster.json("cache", "match", tokens)["runs"][0]["nodes"][0]
    outcome = cluster.json("cache", "evict", tokens, "--staging-only", "--node", holder)["nodes"]
    assert len(outcome) == 1 and outcome[0]["undurable_pages"] == 0
    eventually_sync(lambda: matching(cluster, tokens, 4)["tokens_by_tier"]["disk"] == 4 * CHUNK_TOKENS)
    report, equal = cluster.load(TOKENS)
    assert report.loaded_chunks == 4 and equal
    assert "no live pagestore" in cluster.run("cache", "evict", tokens, "--node", "nowhere", "--yes", code=1)


def test_top_shows_the_traffic(old: Cluster) -> None:
    enough = threading.Event()

    def go_on() -> None:
        while not enough.is_set():
            old.load(TOKENS)

    def traffic() -> dict[str, Any]:
        """What was read between two looks, both of which this machine may let be too close together."""
        seen = old.json("top", "--once", "--interval", "2s")
        moved = sum(seen["total"]["read_bytes"].values()) > 0 and sum(seen["total"]["tokens"].values()) > 0
        return seen if moved and seen["hot"] and seen["hot"][0]["page_reads_per_minute"] > 1 else {}

    engine = threading.Thread(target=go_on)
    engine.start()
    try:
        seen = eventually_sync(traffic)
        text = old.run("top", "--once", "--interval", "500ms")
    finally:
        enough.set()
        engine.join()
    assert [host["host"] for host in seen["hosts"]] == ["host-0", "host-1"]
    assert seen["hot"][0]["keyspace"] == KEYSPACE_NAME
    for part in ("staging   ", "host-0", "host-1", "HOT CHAIN", KEYSPACE_NAME, "redis ok"):
        assert part in text, text


def test_the_doctor_and_the_check_are_content_until_something_is_wrong(old: Cluster, tmp_path: Path) -> None:
    assert old.run("cluster", "status", "--check").startswith("ok: 2 pagestores, 2 agents")
    well = {finding["subject"]: finding["level"] for finding in old.json("doctor")["findings"]}
    assert "error" not in well.values(), well
    assert {well[subject] for subject in ("memory", "cluster", "reachable", "redis_policy", "pid_namespace")} == {"ok"}

    server = redis.Redis(unix_socket_path=str(socket_dir(old.state_dir) / "redis.sock"))
    server.config_set("maxmemory", 100 << 20)
    server.config_set("maxmemory-policy", "allkeys-lru")
    try:
        document = json.loads(fail_json(old, "doctor", "--arena-bytes", "1024TiB"))
    finally:
        server.config_set("maxmemory", 0)
        server.config_set("maxmemory-policy", "noeviction")
        server.close()
    wrong = {
        finding["subject"]: finding["remediation"] for finding in document["findings"] if finding["level"] == "error"
    }
    assert {"memory", "redis_policy"} <= set(wrong)
    assert "noeviction" in wrong["redis_policy"] and "smaller --arena-bytes" in wrong["memory"]


def fail_json(cluster: Cluster, *arguments: str) -> str:
    """The document of a command that ends with code 1."""
    process = cluster.start(*arguments, "--json")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    return out
