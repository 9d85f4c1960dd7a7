"""What processes a cluster is made of."""

import os
from pathlib import Path

import pytest

from kvpool.core.errors import NotServed, StartupFailed
from kvpool_cli import cluster
from kvpool_cli.cluster import (
    ClusterOptions,
    agent_socket,
    check_gpus,
    pagestore_socket,
    plan_agent,
    plan_index,
    plan_pagestore,
    plan_store,
    socket_dir,
)


def value_of(command: tuple[str, ...], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_a_given_redis_is_used_and_its_password_is_on_no_command_line(tmp_path: Path) -> None:
    options = ClusterOptions(state_dir=tmp_path, redis_url="redis://:secret@host:1/0")
    store = plan_store(options)
    assert store.process is None
    index = plan_index(options, store)
    assert "secret" not in " ".join(index.command) + store.description
    assert index.environment["KVPOOL_INDEX_REDIS_URL"] == "redis://:secret@host:1/0"


def test_without_a_server_the_store_is_memory_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    store = plan_store(ClusterOptions(state_dir=tmp_path))
    assert store.url == "" and store.process is None
    assert "memory" in store.description and "redis-server" in store.description
    assert "--memory-index" in plan_store(ClusterOptions(state_dir=tmp_path, memory_index=True)).description


def test_a_redis_server_on_the_path_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = tmp_path / "redis-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    store = plan_store(ClusterOptions(state_dir=tmp_path))
    assert store.process is not None and str(server) in store.process.command
    assert store.url.startswith("unix://")


def test_sockets_of_a_deep_directory_still_fit_the_kernel(tmp_path: Path) -> None:
    for state_dir in (tmp_path, tmp_path / ("d" * 120)):
        options = ClusterOptions(state_dir=state_dir)
        for path in (pagestore_socket(options, 63), agent_socket(options, 63)):
            assert len(os.fsencode(path)) + len(".fds") < 108
    assert socket_dir(tmp_path / ("d" * 120)) != socket_dir(tmp_path / ("e" * 120))


def test_an_agent_without_a_pagestore_of_its_number_uses_streams(tmp_path: Path) -> None:
    options = ClusterOptions(state_dir=tmp_path, pagestores=1, agents=2)
    first, second = (plan_agent(options, number, "h:1").command for number in range(2))
    assert value_of(first, "--pagestore-socket") == str(pagestore_socket(options, 0))
    assert value_of(second, "--pagestore-socket") == ""
    assert value_of(first, "--host-id") != value_of(second, "--host-id")


def test_agents_serve_the_device_that_was_asked_for(tmp_path: Path) -> None:
    for options, device in (
        (ClusterOptions(state_dir=tmp_path), "cpu"),
        (ClusterOptions(state_dir=tmp_path, device="cuda"), "cuda"),
    ):
        assert value_of(plan_agent(options, 0, "h:1").command, "--device") == device


def test_agents_of_gpus_have_one_each_on_one_host(tmp_path: Path) -> None:
    options = ClusterOptions(state_dir=tmp_path, pagestores=1, agents=4, device="cuda")
    commands = [plan_agent(options, number, "h:1").command for number in range(4)]
    assert [value_of(command, "--device-ordinal") for command in commands] == ["0", "1", "2", "3"]
    store = plan_pagestore(options, 0, "h:1").command
    assert {value_of(command, "--host-id") for command in (*commands, store)} == {"host-0"}
    assert {value_of(command, "--pagestore-socket") for command in commands} == {str(pagestore_socket(options, 0))}


def test_each_of_several_pagestores_stands_for_a_host_with_all_gpus(tmp_path: Path) -> None:
    options = ClusterOptions(state_dir=tmp_path, pagestores=2, agents=4, device="cuda")
    commands = [plan_agent(options, number, "h:1").command for number in range(4)]
    assert [value_of(command, "--device-ordinal") for command in commands] == ["0", "0", "1", "1"]
    assert [value_of(command, "--host-id") for command in commands] == ["host-0", "host-1"] * 2
    assert value_of(commands[3], "--pagestore-socket") == str(pagestore_socket(options, 1))


def test_more_agents_than_gpus_are_refused_by_name(tmp_path: Path) -> None:
    check_gpus(ClusterOptions(state_dir=tmp_path, agents=2, device="cuda"), lambda: 2)
    check_gpus(ClusterOptions(state_dir=tmp_path, agents=2, pagestores=2, device="cuda"), lambda: 1)
    check_gpus(ClusterOptions(state_dir=tmp_path, agents=64), lambda: 0)  # of a CPU
    with pytest.raises(StartupFailed, match=r"--agents 3 .*2 GPUs"):
        check_gpus(ClusterOptions(state_dir=tmp_path, agents=3, device="cuda"), lambda: 2)

    def no_driver() -> int:
        raise NotServed("there is no CUDA driver here")

    with pytest.raises(StartupFailed, match="no CUDA driver"):
        check_gpus(ClusterOptions(state_dir=tmp_path, device="cuda"), no_driver)
    check_gpus(ClusterOptions(state_dir=tmp_path, agents=0, device="cuda"), no_driver)


@pytest.mark.parametrize("arena_bytes", [8 << 20, 100_000_000, 1 << 30])
def test_segments_of_a_small_arena_are_small_whole_pages(arena_bytes: int, tmp_path: Path) -> None:
    command = plan_pagestore(ClusterOptions(state_dir=tmp_path, arena_bytes=arena_bytes), 0, "h:1").command
    if "--segment-bytes" in command:
        segment_bytes = int(value_of(command, "--segment-bytes"))
        assert segment_bytes % 4096 == 0
        assert 0 < segment_bytes <= arena_bytes // 8
    assert ("--segment-bytes" in command) == (arena_bytes < 512 << 20)


def test_every_process_ends_with_us(tmp_path: Path) -> None:
    options = ClusterOptions(state_dir=tmp_path)
    store = plan_store(options)
    plans = [plan_index(options, store), plan_pagestore(options, 0, "h:1"), plan_agent(options, 0, "h:1")]
    assert all(value_of(plan.command, "--parent-pid") == str(os.getpid()) for plan in plans)
    if store.process is not None:
        assert store.process.command[1:4] == ("-m", "kvpool_cli.parent_death_guard", str(os.getpid()))


def test_a_cluster_speaks_tls_only_when_configured_and_then_all_of_it(tmp_path: Path) -> None:
    plain = ClusterOptions(state_dir=tmp_path)
    secure = ClusterOptions(
        state_dir=tmp_path,
        tls_cert_file="cert.pem",
        tls_key_file="key.pem",
        tls_ca_file="ca.pem",
        tls_client_auth="none",
    )
    store = plan_store(plain)
    for options in (plain, secure):
        for plan in (plan_index(options, store), plan_pagestore(options, 0, "h:1"), plan_agent(options, 0, "h:1")):
            if options is plain:
                assert not any(part.startswith("--tls") for part in plan.command)
                continue
            assert value_of(plan.command, "--tls-key-file") == os.path.abspath("key.pem")
            assert value_of(plan.command, "--tls-ca-file") == os.path.abspath("ca.pem")
            assert value_of(plan.command, "--tls-client-auth") == "none"
    with pytest.raises(StartupFailed, match="belong together"):
        ClusterOptions(state_dir=tmp_path, tls_ca_file="ca.pem")
