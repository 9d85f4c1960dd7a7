"""The index as a process: it says where it serves, drains on SIGTERM, and says in one line why it cannot start."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest

from kvpool.testing import eventually_sync
from kvpool.v1 import index_pb2, index_pb2_grpc
from kvpool.wire.frames import varint
from tests.fixtures.redis_server import RedisServer
from tests.fixtures.redis_server import redis_server as redis_server
from tests.fixtures.redis_topologies import redis_cluster as redis_cluster
from tests.fixtures.redis_topologies import redis_sentinels as redis_sentinels

pytestmark = pytest.mark.e2e

ROOTS = ("clients/python", "services/common", "services/index")
REPOSITORY = Path(__file__).resolve().parents[2]
RESIDENT_LIMIT_BYTES = 100 << 20


def start(*flags: str, **variables: str) -> "subprocess.Popen[str]":
    path = os.pathsep.join(str(REPOSITORY / root) for root in ROOTS)
    command = [sys.executable, "-m", "kvpool_index.main", "--listen", "127.0.0.1:0", *flags]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
    return subprocess.Popen(
        command, env={**kept, "PYTHONPATH": path, **variables}, stderr=subprocess.PIPE, text=True, cwd="/"
    )


@contextmanager
def running(tmp_path: Path, *flags: str, **variables: str) -> Iterator[tuple["subprocess.Popen[str]", dict[str, str]]]:
    ready = tmp_path / "ready.json"
    ready.write_text("of an earlier run")
    process = start("--ready-file", str(ready), *flags, **variables)
    try:
        eventually_sync(lambda: process.poll() is not None or _is_ready(ready, process.pid))
        assert process.poll() is None, process.communicate()
        yield process, json.loads(ready.read_text())
    finally:
        process.kill()
        process.communicate()


def _is_ready(path: Path, pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):  # it removes what an earlier run left
        return f'"pid": {pid}' in path.read_text()
    return False


@pytest.mark.parametrize("store", ["memory", "redis_server", "redis_sentinels", "redis_cluster"])
def test_it_serves_and_drains(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kind = "memory" if store == "memory" else "redis"
    variables = {"KVPOOL_INDEX_REDIS_TIMEOUT_MS": "60000"}
    if kind == "redis":
        variables["KVPOOL_INDEX_REDIS_URL"] = request.getfixturevalue(store).url
    with running(tmp_path, **variables) as (process, ready):
        assert ready["store"] == kind
        with grpc.insecure_channel(ready["endpoint"]) as channel:
            stub = index_pb2_grpc.IndexServiceStub(channel)
            info = stub.GetIndexInfo(index_pb2.GetIndexInfoRequest(), timeout=60)
            assert (info.store, info.store_reachable) == (kind, True)
            watch = stub.Watch(index_pb2.WatchRequest(), timeout=60)
            with urlopen(ready["metrics_url"], timeout=60) as response:
                assert b"kvpool_index_store_up" in response.read()
            assert resident_bytes(process.pid) < RESIDENT_LIMIT_BYTES
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError):
                next(watch)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
        assert "error" not in log


def test_messages_of_nothing_but_empty_items_do_not_swell_it(tmp_path: Path) -> None:
    """8 MiB of them became 270 MiB of question or 390 MiB of changes: the index of a small pod died of two."""
    empty_questions = b"\x22\x00" * ((4 << 20) - 64)  # MatchStreamRequest.more
    empty_changes = heavy(b"\x12", b"\x12\x00" * ((4 << 20) - 64))
    with running(tmp_path) as (process, ready):
        before_bytes = peak_resident_bytes(process.pid)
        channel: Any
        with grpc.insecure_channel(ready["endpoint"]) as channel:
            for method, message in (("MatchStream", empty_questions), ("Announce", empty_changes)):
                call = channel.stream_stream(f"/kvpool.v1.IndexService/{method}")(iter([message]), timeout=60)
                with pytest.raises(grpc.RpcError):
                    list(call)
                assert call.code() is grpc.StatusCode.INVALID_ARGUMENT, call.details()
                assert "split" in call.details()
            info = index_pb2_grpc.IndexServiceStub(channel).GetIndexInfo(index_pb2.GetIndexInfoRequest(), timeout=60)
            assert info.store == "memory"
        assert peak_resident_bytes(process.pid) - before_bytes < 128 << 20


def heavy(tag: bytes, content: bytes) -> bytes:
    """A field of that many bytes."""
    return tag + varint(len(content)) + content


def peak_resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) << 10


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssFile:")))


def test_a_redis_that_is_down_prevents_no_start_and_no_password_is_logged(tmp_path: Path) -> None:
    url = "redis://user:hunter2@127.0.0.1:1/0"
    with running(tmp_path, KVPOOL_INDEX_REDIS_URL=url) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0 and "hunter2" not in log, (
            "also a Redis that is down does not keep it from starting"
        )


def test_a_redis_of_another_layout_keeps_it_from_starting(redis_server: RedisServer) -> None:
    assert redis_server.command("SET", "other-layout:{n}:layout", "7").startswith(b"+OK")
    flags = ("--redis-key-prefix", "other-layout", "--redis-timeout-ms", "10000")
    process = start(*flags, KVPOOL_INDEX_REDIS_URL=redis_server.url)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2, log
    last = log.strip().splitlines()[-1]
    assert last.startswith("kvpool-index: the keys other-layout:* in Redis have layout '7'"), log
    assert "Deleting the keys" in last
    assert "Traceback" not in log


def test_what_keeps_it_from_starting_is_said_in_one_line(tmp_path: Path) -> None:
    short = tmp_path / "secret"
    short.write_bytes(b"short")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        cases: list[tuple[list[str], dict[str, str], str]] = [
            (["--listen", f"127.0.0.1:{taken.getsockname()[1]}"], {}, "in use"),
            (["--metrics-listen", f"127.0.0.1:{taken.getsockname()[1]}"], {}, "in use"),
            (["--ready-file", str(tmp_path / "no" / "such" / "file")], {}, "ready file"),
            (["--tenant-secret-file", str(short)], {}, "5 bytes"),
            (["--lease-ttl-ms", "0"], {}, "lease_ttl_ms"),
            ([], {"KVPOOL_INDEX_REDIS_URL": "redis://:hunter2@host:port"}, "redis_url"),
            ([], {"KVPOOL_INDEX_REDIS_URL": "redis+sentinel://:hunter2@host:1"}, "redis_url"),
        ]
        started = [(start(*flags, **variables), named) for flags, variables, named in cases]
        for process, named in started:
            _, log = process.communicate(timeout=240)  # all start at once
            assert process.returncode == 2, log
            last = log.strip().splitlines()[-1]
            assert last.startswith("kvpool-index: ") and named in last, log
            assert "Traceback" not in log and "hunter2" not in log
