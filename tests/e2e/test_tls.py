"""A cluster of processes in which every link speaks TLS: pages come out as they went in, also after a renewal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from kvpool.client.gpuagent import EngineSession
from kvpool.client.hashing import Prompt
from kvpool.client.index import IndexClient
from kvpool.client.tls import TlsCredentials
from kvpool.core.cluster import NodeKind
from kvpool.testing import eventually, eventually_sync
from kvpool.wire.tls_files import TlsFiles
from tests.e2e.cli_cluster import PATIENT_COMMAND
from tests.e2e.service_processes import Process, ServiceCluster, service_cluster
from tests.fixtures.agent import EngineProcess, prompt, run_load, run_store
from tests.fixtures.certificates import Authority
from tests.fixtures.patience import patient
from tests.fixtures.redis_server import free_port
from tests.fixtures.redis_tls import running_tls_redis

pytestmark = pytest.mark.e2e

CHUNKS = 4
CLIENT = patient()
SERVICES = ("index", "pagestore", "gpuagent")


class SecureCluster:
    """Redis, index, two pagestores with an agent each, an agent without; each kind of service has a certificate."""

    def __init__(self, directory: Path, authority: Authority, client_auth: str, stack: ExitStack) -> None:
        self._directory = directory
        self.issue(authority)
        self.client_files = authority.issue(directory / "client")
        hosts = stack.enter_context(running_tls_redis("single", authority.issue(directory / "redis")))
        redis = authority.issue(directory / "redis-client")
        more = f"ssl_ca_certs={redis.ca_file}&ssl_certfile={redis.cert_file}&ssl_keyfile={redis.key_file}"
        flags = {name: [*flags_of(files), "--tls-client-auth", client_auth] for name, files in self.files.items()}
        self.health = {name: f"127.0.0.1:{free_port()}" for name in ("index", "bare agent")}
        flags["index"] += ["--health-listen", self.health["index"]]
        services = service_cluster(directory, flags=flags, redis_url=f"rediss://{hosts}?{more}")
        self.services: ServiceCluster = stack.enter_context(services)
        self.stores = [self.services.pagestore(host) for host in ("a", "b")]
        self.agents = [self.services.agent(host, host=host) for host in ("a", "b")] + [
            self.services.agent("bare", health_listen=self.health["bare agent"])
        ]
        self.services.wait_ready()

    def issue(self, authority: Authority, days: float = 10.0, trusted: bytes = b"") -> None:
        """Certificates of all services, new ones if they have some."""
        self.files = {
            name: authority.issue(self._directory / f"{name}-tls", days=days, trusted=trusted) for name in SERVICES
        }

    @property
    def processes(self) -> list[Process]:
        return [self.services.index, *self.stores, *self.agents]


@contextmanager
def secure_cluster(tmp_path: Path, authority: Authority, client_auth: str = "require") -> Iterator[SecureCluster]:
    with ExitStack() as stack:
        yield SecureCluster(tmp_path, authority, client_auth, stack)


async def matched(session: EngineSession, chain: Prompt) -> bool:
    return (await session.match(chain.hashes)).matched_chunks == CHUNKS


async def share(cluster: SecureCluster, seed: int) -> None:
    """What the engine of a stores, those of b (by its pagestore) and of the bare agent (by streams) load, and back."""
    sockets = {name: cluster.services.socket(f"{name}.agent") for name in ("a", "b", "bare")}
    engines = {name: EngineProcess(f"unix:{path}", chunk_count=CHUNKS) for name, path in sockets.items()}
    sessions = {name: await engine.open(CLIENT) for name, engine in engines.items()}
    for source, readers in (("a", ("b", "bare")), ("bare", ("a", "b"))):
        chain = prompt(sessions[source], CHUNKS, seed=seed + len(source))
        engines[source].compute(chain, range(CHUNKS))
        stored = await run_store(sessions[source], engines[source].span(chain, range(CHUNKS)))
        assert stored.stored_chunks == CHUNKS
        for name in readers:
            await eventually(lambda: matched(sessions[name], chain))  # noqa: B023 - called before the next turn
            engines[name].clear()
            loaded = await run_load(sessions[name], engines[name].span(chain, range(CHUNKS)))
            assert loaded.loaded_chunks == CHUNKS, (name, loaded)
            assert engines[name].holds(chain, range(CHUNKS))
    for name, session in sessions.items():
        assert await session.close(), name
        engines[name].close()


def command(
    cluster: SecureCluster, *arguments: str, variables: Mapping[str, str] | None = None, is_refused: bool = False
) -> tuple[int, str]:
    """A command of an operator: its exit code, and what it said. is_refused: it gives up as soon as a user's does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")}
    program = ["-m", "kvpool_cli"] if is_refused else [str(PATIENT_COMMAND)]
    argv = [sys.executable, *program, "--index", cluster.services.index.ready["endpoint"]]
    done = subprocess.run(
        [*argv, *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env=kept | dict(variables or {}),
    )
    return done.returncode, done.stdout + done.stderr


def flags_of(files: TlsFiles) -> list[str]:
    return [part for name, path in files.named() for part in (f"--{name.replace('_', '-')}", str(path))]


def variables_of(files: TlsFiles) -> dict[str, str]:
    return {f"KVPOOL_{name.upper()}": str(path) for name, path in files.named()}


def expiry_s(process: Process) -> float:
    """Of the certificate in use, by the metrics."""
    with urllib.request.urlopen(process.ready["metrics_url"], timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    name = '_certificate_expiry_timestamp_seconds{certificate="own"}'
    return next(float(line.split()[-1]) for line in lines if name in line)


async def test_all_links_are_mutual_and_a_new_ca_comes_in_without_a_restart(tmp_path: Path) -> None:
    authority = Authority("first")
    with secure_cluster(tmp_path, authority) as cluster:
        await share(cluster, seed=1)
        code, said = command(cluster, "status", "--json", *flags_of(cluster.client_files))
        assert code == 0, said
        status = json.loads(said)
        assert len(status["nodes"]) == 5 and not any(node["error"] for node in status["nodes"])

        # Without a certificate, and in the clear, nothing is answered, and it is said why.
        code, said = command(cluster, "status", "--tls-ca-file", str(cluster.client_files.ca_file), is_refused=True)
        assert code == 1 and "demands a client certificate" in said
        code, said = command(cluster, "status", is_refused=True)
        assert code == 1 and "it expects TLS" in said

        # A change of the CA, as docs/tls.md has it: trust both, then new certificates, then trust the new one alone.
        before = [expiry_s(process) for process in cluster.processes]
        renewed = Authority("second")
        cluster.issue(authority, trusted=authority.pem + renewed.pem)
        cluster.issue(renewed, days=20, trusted=authority.pem + renewed.pem)
        cluster.issue(renewed, days=20)
        assert all(new > old for new, old in zip(map(expiry_s, cluster.processes), before, strict=True))
        await share(cluster, seed=2)
        code, said = command(cluster, "status", variables=variables_of(cluster.client_files), is_refused=True)
        assert code == 1 and "tls_ca_file" in said
        code, said = command(cluster, "status", variables=variables_of(renewed.issue(tmp_path / "client")))
        assert code == 0, said


async def test_servers_alone_may_have_certificates(tmp_path: Path) -> None:
    with secure_cluster(tmp_path, Authority(), client_auth="none") as cluster:
        await share(cluster, seed=1)
        for name, endpoint in cluster.health.items():
            async with grpc.aio.insecure_channel(endpoint) as channel:
                check = channel.unary_unary(
                    "/grpc.health.v1.Health/Check",
                    health_pb2.HealthCheckRequest.SerializeToString,
                    health_pb2.HealthCheckResponse.FromString,
                )
                answer = await check(health_pb2.HealthCheckRequest(), timeout=60)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING, name
        client = IndexClient(
            patient(
                index_endpoints=(cluster.services.index.ready["endpoint"],),
                tls=TlsCredentials(TlsFiles(ca_file=cluster.client_files.ca_file)),
            )
        )
        assert len(await client.list_nodes(NodeKind.PAGESTORE)) == 2
        await client.close()


def test_a_pagestore_says_in_its_log_why_its_index_is_out_of_reach(tmp_path: Path) -> None:
    index, stranger = Authority().issue(tmp_path / "index-tls"), Authority("other").issue(tmp_path / "strange")
    with service_cluster(tmp_path, flags={"index": flags_of(index), "pagestore": flags_of(stranger)}) as cluster:
        strange = cluster.pagestore("a")
        eventually_sync(lambda: "does not come from an authority in this client's tls_ca_file" in strange.log())
        assert strange.wait_ready()  # it serves what it has, without an index


def test_a_service_does_not_start_with_files_that_cannot_be_used(tmp_path: Path) -> None:
    files = Authority().issue(tmp_path / "own", passphrase=b"secret")
    done = subprocess.run(
        [sys.executable, "-m", "kvpool_index.main", "--listen", "127.0.0.1:0", *flags_of(files)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "is encrypted; write it without a passphrase" in done.stderr.strip().splitlines()[-1]
