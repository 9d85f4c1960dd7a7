"""compose.tls.yml: the same cluster with mutual TLS on every link, and certificates that it makes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvpool.client.tls import TlsCredentials, TlsFiles
from kvpool.core.errors import ServiceUnavailable
from kvpool.testing.waiting import eventually_sync
from tests.compose.composed import ComposedCluster

pytestmark = pytest.mark.timeout(1800)  # images are built first

DEADLINE_S = 120.0
SEED, TOKENS = 7, 1024
KEYS_OF = {
    "redis": "999 1000",
    **dict.fromkeys(("index-0", "index-1", "pagestore-0", "pagestore-1", "gpuagent-0", "gpuagent-1"), "10001 10001"),
}


def loaded(cluster: ComposedCluster, node: int) -> dict[str, int]:
    """Where the prompt comes from, once it comes whole and as it was stored."""

    def load() -> dict[str, Any]:
        return cluster.engine(node, "load", SEED)

    answer = eventually_sync(load, DEADLINE_S, f"node {node} does not get the prompt")
    assert answer["equal"], answer
    tokens: dict[str, int] = answer["tokens"]
    return tokens


@pytest.fixture(scope="module")
def client_files(tls_cluster: ComposedCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cluster is up; what somebody outside shows it."""
    tls_cluster.up()
    directory = tmp_path_factory.mktemp("client") / "client"
    tls_cluster.compose("cp", "certificates:/certificates/client", str(directory))
    return directory


def test_nodes_share_over_tls(tls_cluster: ComposedCluster, client_files: Path) -> None:
    tls_cluster.engine(0, "store", SEED)
    assert loaded(tls_cluster, 1)["remote"] == TOKENS


async def test_an_index_serves_none_without_a_certificate(tls_cluster: ComposedCluster, client_files: Path) -> None:
    mutual = TlsFiles(
        ca_file=client_files / "ca.crt", cert_file=client_files / "tls.crt", key_file=client_files / "tls.key"
    )
    for index in (0, 1):
        assert len(await tls_cluster.nodes(index, TlsCredentials(mutual))) == 4
        with pytest.raises(ServiceUnavailable):
            await tls_cluster.nodes(index)
        with pytest.raises(ServiceUnavailable):
            await tls_cluster.nodes(index, TlsCredentials(TlsFiles(ca_file=client_files / "ca.crt")))


def test_commands_in_a_container_of_the_index_speak_tls(tls_cluster: ComposedCluster, client_files: Path) -> None:
    said = tls_cluster.compose("exec", "-T", "index-1", "kvpool", "cluster", "status", "--index", "index-0:7100")
    assert all(f"pagestore-{node}" in said for node in (0, 1)), said


def test_redis_does_not_answer_in_the_clear(tls_cluster: ComposedCluster, client_files: Path) -> None:
    tried = "redis-cli -h redis ping 2>&1; redis-cli -h redis --tls --cacert /etc/kvpool/tls/ca.crt ping 2>&1; true"
    said = tls_cluster.compose("exec", "-T", "redis", "sh", "-c", tried)
    assert said and "PONG" not in said


@pytest.mark.parametrize("service", KEYS_OF)
def test_a_service_reads_its_own_key_and_no_other(
    tls_cluster: ComposedCluster, client_files: Path, service: str
) -> None:
    listed = tls_cluster.compose("exec", "-T", service, "sh", "-c", "stat -c '%n %a %u %g' /etc/kvpool/tls/*")
    files = dict(line.split(" ", 1) for line in listed.splitlines())
    assert files.pop("/etc/kvpool/tls/tls.key") == f"400 {KEYS_OF[service]}"
    assert files == {"/etc/kvpool/tls/tls.crt": "444 0 0", "/etc/kvpool/tls/ca.crt": "444 0 0"}


def test_certificates_are_renewed_without_a_restart_of_a_service(
    tls_cluster: ComposedCluster, client_files: Path
) -> None:
    read = ("exec", "-T", "index-0", "cat", "/etc/kvpool/tls/tls.crt")
    before, started_at = tls_cluster.compose(*read), tls_cluster.inspect("index-0")["State"]["StartedAt"]
    tls_cluster.compose("run", "--rm", "certificates")
    assert tls_cluster.compose(*read) == before, "certificates that last were replaced"
    tls_cluster.compose("run", "--rm", "certificates", "--renew")
    assert tls_cluster.compose(*read) != before
    tls_cluster.compose("restart", "redis")  # it alone reads its files only when it starts
    eventually_sync(lambda: tls_cluster.is_healthy("redis"), DEADLINE_S, "redis does not get healthy")
    shown = ("exec", "-T", "index-1", "python", "-c", "import ssl; print(ssl.get_server_certificate(('redis', 6379)))")
    issued = tls_cluster.compose("exec", "-T", "redis", "cat", "/etc/kvpool/tls/tls.crt")
    assert "".join(tls_cluster.compose(*shown).split()) == "".join(issued.split())
    for node in (0, 1):
        loaded(tls_cluster, node)
    assert tls_cluster.inspect("index-0")["State"]["StartedAt"] == started_at
