"""How fast are pages carried between clusters by a file (`kvpool cache export` and `import`), by page size?

For each size a file of random but true pages is made, verified (`import --verify-only`: reading, sums and digest, and
no cluster), imported into a fresh cluster of one pagestore on this machine, and exported from it again. The baseline is
a plain copy of the file with one fsync. Seconds are those of the whole command; a command of this kind that has nothing
to do takes `start_s`.

Run: python -m bench.carried_pages [--sizes 4096,65536,524288] [--mebibytes 64] [--before DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.rig.cluster import bench_cluster
from kvpool import __version__
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient, OpenedKeyspace
from kvpool.core.chunks import ROOT_HASH, chunk_hashes, group_head_index
from kvpool.core.cluster import PageMetadata
from kvpool.core.export_format import Manifest, key_check
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool.core.page import HEADER_BYTES, PageKey, page_bytes, seal
from kvpool_cli.cluster import ClusterOptions
from kvpool_cli.export_file import ExportWriter

ROOTS = ("clients/python", "services/common", "services/index", "services/pagestore", "services/gpuagent", ".")
CHUNK_TOKENS = 16
CHAIN_CHUNKS = 64
CHUNKS_MAX = 8192  # of one file


def spec_of(payload_bytes: int) -> KeyspaceSpec:
    """Chunks of one page: a layer, K and V, one head in bfloat16."""
    return KeyspaceSpec(
        model_id=f"pages-{payload_bytes}",
        model_revision="1",
        groups=(KvGroup(1, 1, payload_bytes // (2 * 2 * CHUNK_TOKENS)),),
        dtype=Dtype.BF16,
        chunk_tokens=CHUNK_TOKENS,
    )


def write_file(path: Path, keyspace: OpenedKeyspace, spec: KeyspaceSpec, chunk_count: int) -> None:
    """Chains of CHAIN_CHUNKS chunks."""
    manifest = Manifest(
        name=spec.model_id,
        tenant="default",
        spec=spec,
        key_check=key_check(keyspace.hash_key),
        created_by=f"kvpool {__version__}",
    )
    (payload_len,) = manifest.payload_sizes()
    writer, noise = ExportWriter(path, manifest), random.Random(payload_len).randbytes(payload_len)
    page = bytearray(page_bytes(payload_len))
    for chain in range(-(-chunk_count // CHAIN_CHUNKS)):
        count = min(CHAIN_CHUNKS, chunk_count - chain * CHAIN_CHUNKS)
        hashes = chunk_hashes(keyspace.hash_key, [chain] * (count * CHUNK_TOKENS), CHUNK_TOKENS)
        for index, chunk_hash in enumerate(hashes):
            page[HEADER_BYTES : HEADER_BYTES + payload_len] = noise
            page[HEADER_BYTES : HEADER_BYTES + 16] = chunk_hash  # no two pages are alike
            seal(page, PageKey(keyspace.keyspace, chunk_hash, 0), spec.codec, payload_len)
            kept = PageMetadata(
                parent_hash=hashes[index - 1] if index else ROOT_HASH,
                chunk_index=index,
                group_head_hash=hashes[group_head_index(index)],
            )
            writer.add(chunk_hash, kept, 1, [page])
    writer.finish(keyspace.hash_key)
    writer.close()


def seconds(*arguments: str) -> float:
    """Wall time of one `kvpool` command."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "kvpool_cli", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started_s


def copied_s(path: Path) -> float:
    """Of the baseline: read and written once, durable."""
    started_s = time.perf_counter()
    with path.open("rb") as source, path.with_suffix(".copy").open("wb") as copy:
        while piece := source.read(1 << 20):
            copy.write(piece)
        copy.flush()
        os.fsync(copy.fileno())
    return time.perf_counter() - started_s


async def _opened(endpoint: str, spec: KeyspaceSpec) -> OpenedKeyspace:
    index = IndexClient(ClientConfig(index_endpoints=(endpoint,)))
    try:
        return await index.open_keyspace(spec.model_id, spec)
    finally:
        await index.close()


def measure(payload_bytes: int, size_bytes: int, directory: Path) -> dict[str, Any]:
    """One size of pages, in a cluster of its own."""
    spec, path = spec_of(payload_bytes), directory / f"{payload_bytes}.kvpx"
    chunk_count = min(CHUNKS_MAX, size_bytes // payload_bytes)
    options = ClusterOptions(
        state_dir=Path(), pagestores=1, agents=0, arena_bytes=256 << 20, disk_bytes=2 << 30, memory_index=True
    )
    with bench_cluster(options) as (state, _):
        endpoint = state.of_role("index")[0].endpoints["endpoint"]
        write_file(path, asyncio.run(_opened(endpoint, spec)), spec, chunk_count)
        index, megabytes = ("--index", endpoint), path.stat().st_size / 1e6
        copy_s = copied_s(path)
        verify_s = seconds("cache", "import", str(path), "--verify-only")
        import_s = seconds("cache", "import", str(path), *index)
        export_s = seconds("cache", "export", str(directory / "again.kvpx"), "--keyspace", spec.model_id, *index)
        lost_bytes = path.stat().st_size - (directory / "again.kvpx").stat().st_size
        assert not lost_bytes, f"{lost_bytes} bytes of {path.stat().st_size} did not come back"
    return {
        "page_bytes": page_bytes(payload_bytes),
        "chunks": chunk_count,
        "megabytes": round(megabytes, 1),
        **{
            f"{name}_s": round(value, 3)
            for name, value in {"copy": copy_s, "verify": verify_s, "import": import_s, "export": export_s}.items()
        },
        "import_pages_per_s": round(chunk_count / import_s),
        "import_mb_per_s": round(megabytes / import_s, 1),
        "export_pages_per_s": round(chunk_count / export_s),
        "export_mb_per_s": round(megabytes / export_s, 1),
    }


def measured_in(source: Path, size: int, mebibytes: int) -> dict[str, Any]:
    """`measure` in a process that has the sources of a checkout."""
    path = os.pathsep.join(str(source / root) for root in ROOTS)
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--sizes", str(size)]
    done = subprocess.run(
        [*command, "--mebibytes", str(mebibytes)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=source,
        check=True,
        stdout=subprocess.PIPE,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4096,65536,524288", help="bytes of payload of a page")
    parser.add_argument("--mebibytes", type=int, default=64, help="of each file, if that is not too many pages")
    parser.add_argument("--before", type=Path, help="a checkout of another state, measured in turn with this one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.worker:
        with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as directory:
            print(json.dumps(measure(int(parsed.sizes), parsed.mebibytes << 20, Path(directory))))
        return
    sources = {"before": parsed.before.resolve()} if parsed.before else {}
    sources["now"] = Path(__file__).resolve().parents[1]
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": "2-core virtual machine",
        "command": f"python -m bench.carried_pages --sizes {parsed.sizes} --mebibytes {parsed.mebibytes}"
        + (" --before DIR" if parsed.before else ""),
        "start_s": round(seconds("--version"), 3),
        **{name: [] for name in sources},
    }
    for size in parsed.sizes.split(","):
        for name, source in sources.items():
            found[name].append(measured_in(source, int(size), parsed.mebibytes))
            print(name, json.dumps(found[name][-1]), flush=True)
    if parsed.json:
        parsed.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
