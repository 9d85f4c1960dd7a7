"""A light load of matches on one index: requests made beforehand, answers not looked into. Started by the bench.

Run: python -m bench.match_load ENDPOINT REQUESTS_FILE STREAMS IN_FLIGHT SECONDS; prints answers and its CPU seconds.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import grpc

from kvpool_server.process import poll_grpc_directly

_METHOD = "/kvpool.v1.IndexService/MatchStream"


async def load(endpoint: str, requests: list[bytes], streams: int, in_flight: int, seconds: float) -> int:
    """Answers that came within the time; in_flight a stream."""
    ends_at_s = time.monotonic() + seconds
    answered = 0

    async with grpc.aio.insecure_channel(endpoint) as channel:

        async def run(first: int) -> None:
            nonlocal answered
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(_METHOD)()
            number = first
            for _ in range(in_flight):
                await call.write(requests[number % len(requests)])
                number += 1
            while time.monotonic() < ends_at_s:
                await call.read()
                answered += 1
                await call.write(requests[number % len(requests)])
                number += 1
            call.cancel()

        await asyncio.gather(*(run(number * 7) for number in range(streams)))
    return answered


def main() -> None:
    endpoint, path, streams, in_flight, seconds = sys.argv[1:]
    poll_grpc_directly()  # as agents do
    size, data = 0, Path(path).read_bytes()
    size = int.from_bytes(data[:4], "little")
    requests = [data[at : at + size] for at in range(4, len(data), size)]
    answered = asyncio.run(load(endpoint, requests, int(streams), int(in_flight), float(seconds)))
    print(answered, time.process_time())


if __name__ == "__main__":
    main()
