"""Planted faults are found, with their remediation; what is well is not complained of."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool_cli.doctor import cluster
from kvpool_cli.doctor.cluster import examine_nodes, examine_packages, examine_status
from kvpool_cli.doctor.command import render, to_document
from kvpool_cli.doctor.finding import Finding, Level, failure, ok, skipped, warning
from kvpool_cli.doctor.gpu import examine_gpu
from kvpool_cli.doctor.machine import Machine, descriptors, kernel, memory
from kvpool_cli.doctor.redis_server import examine_redis, examine_server
from kvpool_cli.doctor.storage import examine_directory
from kvpool_cli.main import run_command as main
from kvpool_cli.output import as_text
from tests.fixtures.patience import PATIENCE_S

GIB = 1 << 30


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.subject: finding.level for finding in findings}


def fake_root(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_that_is_not_there_is_bad(tmp_path: Path) -> None:
    root = fake_root(
        tmp_path,
        proc__meminfo="MemTotal: 99 kB\nMemAvailable: 4194304 kB\nSwapTotal: 1000 kB\nSwapFree: 10 kB\n",
        proc__self__cgroup="0::/kvpool.slice/store\n",
    )
    (root / "sys/fs/cgroup/kvpool.slice/store").mkdir(parents=True)
    (root / "sys/fs/cgroup/kvpool.slice/store/memory.max").write_text("max\n")
    (root / "sys/fs/cgroup/kvpool.slice/memory.max").write_text(f"{3 * GIB}\n")
    small, large = (Machine(root=root, arena_bytes=size) for size in (GIB, 8 * GIB))
    assert levels(list(memory(small))) == {"memory": Level.OK, "cgroup": Level.OK, "swap": Level.WARNING}
    assert levels(list(memory(Machine(root=root)))) == {"memory": Level.SKIPPED, "swap": Level.WARNING}
    assert levels(list(memory(large))) == {"memory": Level.ERROR, "cgroup": Level.ERROR, "swap": Level.WARNING}


@pytest.mark.parametrize(
    ("limit", "level"),
    [(256, Level.ERROR), (4096, Level.WARNING), (resource.RLIM_INFINITY, Level.OK), (65536, Level.OK)],
)
def test_few_descriptors_are_reported(limit: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert levels(list(descriptors()))["nofile"] is level


def test_a_kernel_that_gets_in_the_way_is_reported(tmp_path: Path) -> None:
    root = fake_root(
        tmp_path,
        proc__sys__kernel__osrelease="5.4.0-generic\n",
        proc__sys__vm__max_map_count="1000\n",
        proc__sys__vm__overcommit_memory="2\n",
        sys__kernel__mm__transparent_hugepage__enabled="[always] madvise never\n",
        sys__kernel__mm__transparent_hugepage__shmem_enabled="always within_size advise [never] deny force\n",
    )
    assert levels(list(kernel(Machine(root=root)))) == {
        "kernel": Level.ERROR,
        "max_map_count": Level.WARNING,
        "huge_pages": Level.OK,
        "thp_always": Level.WARNING,
        "overcommit": Level.WARNING,
    }
    assert levels(list(kernel(Machine(root=tmp_path / "nothing")))) == {"kernel": Level.OK}


def test_gpus_that_cannot_be_shared_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(list(examine_gpu(Machine(root=tmp_path), []))) == {
        "gpu": Level.SKIPPED,
        "pid_namespace": Level.SKIPPED,
    }
    root = fake_root(tmp_path, dev__nvidia0="", proc__sys__kernel__yama__ptrace_scope="3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = levels(list(examine_gpu(Machine(root=root), [])))
    assert found["gpu"] is Level.ERROR and found["ptrace"] is Level.WARNING and found["driver"] is Level.WARNING
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert levels(list(examine_gpu(Machine(root=root), [])))["gpu"] is Level.OK


def test_an_agent_that_is_gone_or_in_another_namespace_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert levels(list(examine_gpu(Machine(root=tmp_path), [str(path)])))["pid_namespace"] is Level.OK
    found = [one for one in examine_gpu(Machine(root=tmp_path), [str(path)]) if one.subject == "pid_namespace"]
    assert found[0].level is Level.ERROR and "shareProcessNamespace" in found[0].remediation


def test_a_disk_without_room_is_bad(tmp_path: Path) -> None:
    assert levels(list(examine_directory(tmp_path, 1 << 60)))["disk_space"] is Level.ERROR
    assert levels(list(examine_directory(tmp_path, 4096)))["disk_space"] is Level.OK
    assert levels(list(examine_directory(tmp_path / "none", 1)))["data_dir"] is Level.ERROR
    assert not os.listdir(tmp_path), "nothing is left behind"


def test_a_file_system_that_cannot_write_past_its_cache_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    assert levels(list(examine_directory(tmp_path, 1)))["direct_io"] is Level.WARNING
    assert not os.listdir(tmp_path)


class ScriptedRedis:
    def __init__(self, *, save: str = "3600 1", skew_s: float = 0.0, **info: Any) -> None:
        self._info = {
            "maxmemory": 0,
            "maxmemory_policy": "noeviction",
            "redis_version": "7.2.4",
            "used_memory": 5,
        } | info
        self._save = save
        self._skew_s = skew_s

    def info(self) -> dict[str, Any]:
        return self._info

    def config_get(self, name: str) -> dict[str, str]:
        return {name: self._save}

    def ping(self) -> None:
        pass

    def time(self) -> tuple[int, int]:
        return int(time.time() + self._skew_s), 500_000


@pytest.mark.parametrize(
    ("redis", "subject", "level"),
    [
        (ScriptedRedis(), "redis_policy", Level.OK),
        (ScriptedRedis(maxmemory_policy="allkeys-lru"), "redis_policy", Level.WARNING),
        (ScriptedRedis(maxmemory_policy="allkeys-lru", maxmemory=10), "redis_policy", Level.ERROR),
        (ScriptedRedis(maxmemory=10, used_memory=9), "redis_memory", Level.ERROR),
        (ScriptedRedis(save=""), "redis_persistence", Level.WARNING),
        (ScriptedRedis(save="", aof_enabled=1), "redis_persistence", Level.OK),
        (ScriptedRedis(rdb_last_bgsave_status="err"), "redis_persistence", Level.ERROR),
        (ScriptedRedis(redis_version="5.0.7"), "redis_version", Level.ERROR),
        (ScriptedRedis(skew_s=60.0), "clock", Level.ERROR),
        (ScriptedRedis(), "clock", Level.OK),
    ],
)
def test_a_redis_that_would_lose_what_it_stores_is_reported(redis: ScriptedRedis, subject: str, level: Level) -> None:
    assert levels(list(examine_server("redis", redis)))[subject] is level


@pytest.mark.slow
def test_a_redis_that_does_not_answer_is_bad_and_no_password_is_shown() -> None:
    (found,) = examine_redis("redis://:secret@127.0.0.1:1/0")
    assert found.level is Level.ERROR and "secret" not in found.message
    assert next(iter(examine_redis("redis+sentinel://:secret@127.0.0.1:1/main"))).level is Level.ERROR


def node(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "pagestore",
        "host_id": "host-0",
        "endpoint": "127.0.0.1:1",
        "bulk_endpoint": "",
        "metrics_url": "",
    } | changes


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_addresses_are_tried_and_must_mean_the_same_elsewhere(listening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_CONNECT_TIMEOUT_S", PATIENCE_S)
    alone = asyncio.run(examine_nodes([node(endpoint=listening)], is_embedded=False))
    assert levels(alone) == {"reachable": Level.OK, "clock": Level.SKIPPED}
    both = [node(endpoint=listening), node(endpoint=listening, bulk_endpoint="127.0.0.1:1", host_id="host-1")]
    found = asyncio.run(examine_nodes(both, is_embedded=False))
    assert levels(found)["advertised"] is Level.ERROR and levels(found)["reachable"] is Level.ERROR
    assert "advertised" not in levels(asyncio.run(examine_nodes(both, is_embedded=True)))


@pytest.mark.parametrize(("skew_s", "level"), [(0.4, Level.OK), (-40.0, Level.ERROR), (None, Level.SKIPPED)])
def test_clocks_are_compared(skew_s: float | None, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "clock_skew_s", lambda url: skew_s)
    found = asyncio.run(examine_nodes([node(endpoint="", metrics_url="http://x/metrics")], is_embedded=False))
    assert levels(found)["clock"] is level


def test_versions_of_nodes_are_compared() -> None:
    def of(version: str) -> dict[tuple[str, str], float]:
        return {("kvpool_process_info", version): 1.0, ("kvpool_pagestore_leases", ""): 0.0}

    assert cluster.versions({"a": None, "b": {}}) == []
    assert levels(cluster.versions({"a": of("0.2.0"), "b": of("0.2.1")})) == {"node_versions": Level.OK}
    (mixed,) = cluster.versions({"a": of("0.2.0"), "b": of("0.3.0"), "c": of("0.3.0")})
    assert mixed.level is Level.WARNING and "1 of 0.2.0, 2 of 0.3.0" in mixed.message


def test_problems_and_versions_of_a_cluster_are_reported() -> None:
    document: dict[str, Any] = {
        "index": {"version": "0.1.9"},
        "store": {"kind": "redis"},
        "nodes": [],
        "problems": ["pagestore ab: its disk tier is off"],
    }
    assert levels(list(examine_status(document)))["cluster"] is Level.ERROR
    document |= {"problems": [], "index": {"version": "9.0.0"}}
    assert levels(list(examine_status(document))) == {"cluster": Level.OK, "version": Level.WARNING}


def test_packages_that_are_missing_or_old_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(list(examine_packages()))["packages"] in (Level.OK, Level.SKIPPED)
    monkeypatch.setattr(cluster, "requires", lambda name: ["grpcio>=999.1", "not-there>=1", 'x>=1; extra == "y"'])
    (found,) = examine_packages()
    assert found.level is Level.ERROR and "grpcio" in found.message and "not-there is missing" in found.message
    assert "/path/to/checkout" in found.remediation, "kvpool is not on a package index"


def test_findings_are_reported_the_worst_last() -> None:
    findings = [
        failure("b", "is bad", "mend it"),
        ok("a", "is well"),
        warning("w", "is slow", "hurry"),
        skipped("s", "?"),
    ]
    lines = as_text(render(findings)).splitlines()
    assert lines[0].startswith("ok") and "-> mend it" in lines[-2] and lines[-1].startswith("4 looked at: 1 errors")
    assert to_document(findings)["errors"] == 1


def test_a_machine_without_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--state-dir", str(tmp_path), "doctor", "--json", "--arena-bytes", "1024TiB"]) == 1
    document = json.loads(capsys.readouterr().out)
    found = {finding["subject"]: finding["level"] for finding in document["findings"]}
    assert found["memory"] == "error" and found["cluster"] == "skipped" and document["version"] == 1
