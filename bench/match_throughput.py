"""Matches a second of one index process and of two, and the processor time that each match takes where.

On a machine of two cores, Redis and the load take as much of them as an index does: what two processes give beside one
is measured as it is, and the processor time of index and Redis a match says what cores of their own would give.

Run: python -m bench.match_throughput [--chunks 128] [--stored 1000000] [--seconds 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.match_rig import Server, filled, query_of, rig
from kvpool.v1 import index_pb2
from kvpool.wire.convert_cluster import chain_query_to_proto

STREAMS, IN_FLIGHT = 2, 8


async def measure(redis: Server, indexes: list[Server], given: argparse.Namespace) -> dict[str, float]:
    """All loads at once for the given time."""
    async with filled(redis, indexes[0], given.stored) as (_, chains):
        with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as directory:
            requests = Path(directory) / "requests"
            made = [
                index_pb2.MatchStreamRequest(
                    request_id=number + 1, match=chain_query_to_proto(query_of(chains, number, given.chunks))
                ).SerializeToString()
                for number in range(min(100, chains.chain_count - 1))  # ids of one byte: all are of one size
            ]
            requests.write_bytes(len(made[0]).to_bytes(4, "little") + b"".join(made))
            return await _loaded(redis, indexes, requests, given.seconds)


async def _loaded(redis: Server, indexes: list[Server], requests: Path, seconds: float) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.match_load"]
    before = [redis.cpu_s(), *(index.cpu_s() for index in indexes)]
    loads = [
        await asyncio.create_subprocess_exec(
            *command, index.endpoint, str(requests), str(STREAMS), str(IN_FLIGHT), str(seconds), stdout=subprocess.PIPE
        )
        for index in indexes
    ]
    outputs = [(await load.communicate())[0].split() for load in loads]
    after = [redis.cpu_s(), *(index.cpu_s() for index in indexes)]
    answered = sum(int(words[0]) for words in outputs)
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return {
        "matches_a_second": answered / seconds,
        "index_cpu_ms": sum(spent[1:]) / answered * 1e3,
        "redis_cpu_ms": spent[0] / answered * 1e3,
        "load_cpu_ms": sum(float(words[1]) for words in outputs) / answered * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of matches.")
    parser.add_argument("--chunks", type=int, default=128)
    parser.add_argument("--stored", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    rows = {}
    for count in (1, 2):
        with contextlib.ExitStack() as stack:
            redis, indexes = stack.enter_context(rig(count))
            rows[f"{count} index"] = asyncio.run(measure(redis, indexes, given))
        print(count, {name: round(value, 3) for name, value in rows[f"{count} index"].items()}, flush=True)
    rows["ratio"] = {"two_to_one": rows["2 index"]["matches_a_second"] / rows["1 index"]["matches_a_second"]}
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
