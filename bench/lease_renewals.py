"""CPU of one index process while members of a large cluster do nothing but keep their leases.

python -m bench.lease_renewals --agents 8000 --pagestores 1000 --seconds 20

One process plays all members: agents hold nothing and renew without a load, pagestores with one.
Prints cores used by the index and by Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.process_usage import cpu_s
from kvpool.client.channel import open_channel
from kvpool.client.config import ClientConfig
from kvpool.v1 import index_pb2, index_pb2_grpc
from tests.fixtures.redis_server import running_redis

_MEMBERS_A_CHANNEL = 200
_REGISTERED_AT_ONCE = 32


class Member:
    """One node: registers, and then renews until it is cancelled."""

    def __init__(self, stub: index_pb2_grpc.IndexServiceAsyncStub, *, is_agent: bool) -> None:
        self.stub, self.is_agent = stub, is_agent
        self.node_id = secrets.token_bytes(16)
        self.incarnation = 0
        self.count = self.lost_count = 0
        self.registered = asyncio.Event()

    async def run(self, places: asyncio.Semaphore) -> None:
        async with places:
            await self.register()
        self.registered.set()
        await self._renew()

    async def register(self) -> None:
        kind = index_pb2.NODE_KIND_AGENT if self.is_agent else index_pb2.NODE_KIND_PAGESTORE
        node = index_pb2.NodeInfo(
            node_id=self.node_id, kind=kind, endpoint="10.0.0.1:7200", host_id="host", incarnation=self.incarnation
        )
        answer = await self.stub.RegisterNode(index_pb2.RegisterNodeRequest(node=node), timeout=60)
        self.incarnation = answer.incarnation

    def request(self) -> index_pb2.LeaseToRenew:
        load = None if self.is_agent else index_pb2.NodeLoad(page_count=self.count, reconcile_age_ms=1)
        return index_pb2.LeaseToRenew(node_id=self.node_id, incarnation=self.incarnation, load=load)

    async def _renew(self) -> None:
        call = self.stub.RenewLeases()
        while True:
            await call.write(index_pb2.RenewLeasesRequest(renewals=[self.request()]))
            answer = await call.read()
            assert isinstance(answer, index_pb2.RenewLeasesResponse), "the stream ended"
            if answer.refused:  # the machine is too busy: as a node would
                self.lost_count += 1
                await self.register()
                continue
            first, self.count = self.count == 0, self.count + 1
            pause_s = (answer.idle_renew_interval_ms if self.is_agent else answer.renew_interval_ms) / 1e3
            await asyncio.sleep(pause_s * random.random() if first else pause_s)


@contextmanager
def running_index(redis_url: str, extra: list[str]) -> Iterator[tuple[int, str]]:
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready.json"
        command = [sys.executable, "-m", "kvpool_index.main", "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
        process = subprocess.Popen(
            [*command, "--log-level", "error", *extra], env=_environment(redis_url), stdout=subprocess.DEVNULL
        )
        try:
            while not ready.exists():
                assert process.poll() is None, "the index ended"
                time.sleep(0.05)
            yield process.pid, json.loads(ready.read_text())["endpoint"]
        finally:
            process.terminate()
            process.wait(20)


def _environment(redis_url: str) -> dict[str, str]:
    return {**os.environ, "KVPOOL_INDEX_REDIS_URL": redis_url}


async def play(endpoint: str, arguments: argparse.Namespace, pids: dict[str, int]) -> None:
    total = arguments.agents + arguments.pagestores
    channels = [open_channel(endpoint, ClientConfig()) for _ in range(-(-total // _MEMBERS_A_CHANNEL))]
    stubs = [index_pb2_grpc.IndexServiceStub(channel) for channel in channels]
    members = [Member(stubs[n // _MEMBERS_A_CHANNEL], is_agent=n < arguments.agents) for n in range(total)]
    places = asyncio.Semaphore(_REGISTERED_AT_ONCE)
    tasks = [asyncio.create_task(member.run(places)) for member in members]
    await asyncio.gather(*(member.registered.wait() for member in members))
    print(f"{total} members registered", flush=True)
    await asyncio.sleep(arguments.warm_up)
    began_s, before = time.monotonic(), {name: cpu_s(pid) for name, pid in pids.items()}
    renewed, lost = sum(member.count for member in members), sum(member.lost_count for member in members)
    await asyncio.sleep(arguments.seconds)
    took_s = time.monotonic() - began_s
    renewed = sum(member.count for member in members) - renewed
    used = {name: (cpu_s(pid) - before[name]) / took_s for name, pid in pids.items()}
    failed = [task.exception() for task in tasks if task.done()]
    assert not failed, failed[0]
    alive = (await stubs[0].ListNodes(index_pb2.ListNodesRequest(), timeout=60)).nodes
    print(
        f"{total} members: {renewed / took_s:.0f} renewals/s, {len(alive)} alive, "
        f"{sum(member.lost_count for member in members) - lost} leases lost; "
        + ", ".join(f"{name} {cores:.3f} cores" for name, cores in used.items()),
        flush=True,
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for channel in channels:
        await channel.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=8000)
    parser.add_argument("--pagestores", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up", type=float, default=12.0)
    arguments = parser.parse_args()
    limits = ["--max-peer-open-calls", "20000", "--redis-timeout-ms", "20000"]  # one process plays all
    with running_redis() as redis, running_index(redis.url, limits) as (pid, endpoint):
        asyncio.run(asyncio.wait_for(play(endpoint, arguments, {"index": pid, "redis": redis.pid}), 150))


if __name__ == "__main__":
    main()
