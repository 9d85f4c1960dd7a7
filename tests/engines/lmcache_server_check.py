"""Runs in LMCache's own environment: its server with the quick start's command line, and its storage manager.

    python tests/engines/lmcache_server_check.py '{"settings": {...}, "pagestore_pid": 1, "quickstart": "...",
      "check": "server or storage"}'

Real: the server's process and its status; in this process its argument parser, storage manager, L1, store and prefetch
controllers. Left out: an engine, whose KV a GPU would bring to L1; objects are written to L1 by hand. Prints one JSON
object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from lmcache.cli.commands.server import ServerCommand
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import parse_args_to_config
from lmcache.v1.distributed.storage_manager import StorageManager

LAYOUT = MemoryLayoutDesc([torch.Size([2, 4, 256, 512])], [torch.bfloat16])  # 2 MiB
OBJECTS = 24
WAIT_S = 30.0
START_S = 75.0  # of the server, which imports a lot
KEYS = [
    ObjectKey(chunk_hash=hashlib.sha256(bytes([number])).digest(), model_name="meta/tiny", kv_rank=0)
    for number in range(OBJECTS)
]


def quickstart_words(text: str, settings: dict[str, Any]) -> list[str]:
    """Arguments of `lmcache server` as they stand in the quick start; only the cluster is another one."""
    found = re.search(r"lmcache server (.*?\}\}')", text, re.DOTALL)
    assert found, "the quick start has another form"
    words = shlex.split(found[1].replace("\\\n", " "))
    at = words.index("--l2-adapter") + 1
    described: dict[str, Any] = json.loads(words[at])
    assert set(settings) >= {"index_endpoints", "pagestore", "host_id"} <= set(described["adapter_params"])
    described["adapter_params"] |= settings
    words[at] = json.dumps(described)
    words[words.index("--l1-size-gb") + 1] = "0.25"
    return words


def until(asked: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    ends_s = time.monotonic() + wait_s
    while not asked():
        assert time.monotonic() < ends_s, what
        time.sleep(0.02)


def manager_of(words: list[str]) -> StorageManager:
    """As the server makes one."""
    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    return StorageManager(parse_args_to_config(parser.parse_args(words)))


def adapter_of(manager: StorageManager) -> Any:
    [(_, adapter)] = manager.l2_adapters()
    return adapter


def content(number: int) -> torch.Tensor:
    size_bytes = LAYOUT.shapes[0].numel() * 2
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def store(manager: StorageManager) -> None:
    """Into L1, from where LMCache's store controller takes it to L2."""
    taken = manager.reserve_write(KEYS, LAYOUT)
    assert set(taken) == set(KEYS)
    for number, key in enumerate(KEYS):
        memoryview(taken[key].byte_array).cast("B")[:] = content(number).numpy().tobytes()
    manager.finish_write(KEYS)
    adapter = adapter_of(manager)
    until(lambda: adapter.report_status()["stored_chunks"] == OBJECTS, "the store controller stored nothing")


def prefetch(manager: StorageManager) -> tuple[int, int]:
    """(objects that came from L2, objects that L1 had) of the prefix; those that are there hold what was stored."""
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(KEYS, 0, LAYOUT)]))
    assert manager.wait_prefetch_status(handle, WAIT_S), "the prefetch does not end"
    result = manager.query_prefetch_status(handle)
    assert result is not None
    hits = KEYS[: result.hit_cells[0].popcount()]
    if hits:
        with manager.read_prefetched_results(hits) as objects:
            assert objects is not None
            for number, one in enumerate(objects):
                assert bytes(one.byte_array) == bytes(content(number).numpy()), number
        manager.finish_read_prefetched(hits)
    return result.l2_hit_count, result.l1_hit_count


def check_storage(words: list[str], pagestore_pid: int) -> None:
    first = manager_of(words)
    store(first)
    assert prefetch(first) == (0, OBJECTS)
    first.clear(force=True)
    assert prefetch(first) == (OBJECTS, 0), "with an empty L1"
    adapter_of(first).delete(KEYS[:1])  # logs once that it is not served, and nothing is lost
    first.clear(force=True)
    first.close()
    second = manager_of(words)  # as after a restart
    assert prefetch(second) == (OBJECTS, 0)
    assert sum(prefetch(second)) == OBJECTS  # its default policy keeps none of them in L1
    usage = adapter_of(second).get_usage()
    assert usage.usage_fraction < 0, "eviction is the pagestores', so no capacity is declared"
    second.clear(force=True)
    os.kill(pagestore_pid, signal.SIGKILL)
    assert prefetch(second) == (0, 0)
    second.close()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def check_server(words: list[str], directory: str) -> None:
    """The process starts with the adapter, reports it, and ends in order."""
    ports = [free_port() for _ in range(3)]
    places = ["--host", "127.0.0.1", "--port", str(ports[0]), "--http-host", "127.0.0.1", "--http-port", str(ports[1])]
    command = [str(Path(sys.executable).parent / "lmcache"), "server", *words, *places]
    with open(Path(directory) / "server.log", "wb") as log:
        server = subprocess.Popen(
            [*command, "--prometheus-port", str(ports[2])], stdout=log, stderr=subprocess.STDOUT, cwd=directory
        )
    reported: dict[str, Any] = {}

    def ready() -> bool:
        assert server.poll() is None, (Path(directory) / "server.log").read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/status", timeout=5) as answer:
                reported.update(json.load(answer))
        except (urllib.error.URLError, ConnectionError):
            return False
        return True

    try:
        until(ready, "the server does not answer", START_S)
        text = json.dumps(reported)
        assert reported["is_healthy"] and "KvPoolL2Adapter" in text and '"looked_up_chunks"' in text, text
        server.send_signal(signal.SIGTERM)
        assert server.wait(WAIT_S) in (0, -signal.SIGTERM)  # uvicorn ends by the signal that it was sent
        said = (Path(directory) / "server.log").read_text()
        assert "MPCacheServer closed" in said and "Traceback" not in said, said[-3000:]
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def main() -> None:
    given = json.loads(sys.argv[1])
    words = quickstart_words(Path(given["quickstart"]).read_text(), given["settings"])
    if given["check"] == "server":
        with tempfile.TemporaryDirectory() as directory:
            check_server(words, directory)
    else:
        check_storage(words, given["pagestore_pid"])
    print(json.dumps({"lmcache": version("lmcache"), "torch": torch.__version__, "checked": True}))


if __name__ == "__main__":
    main()
