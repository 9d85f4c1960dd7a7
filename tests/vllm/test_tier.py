"""kvpool's tier under vLLM's own TieringOffloadingManager, with a real cluster: nothing of another prompt, weight or
group ever comes back, and whatever fails is a miss."""

from __future__ import annotations

import asyncio
import itertools
import json
import mmap
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from kvpool.client.config import ClientConfig
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.testing import eventually_sync
from tests.fixtures.direct_cluster import DirectCluster, direct_cluster
from tests.fixtures.staging import leave_staging
from tests.vllm.engine import REPOSITORY, VLLM_PYTHON_VARIABLE, vllm_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
CHUNKS = 8  # of vLLM's CPU region
CHUNK_BYTES = 256 << 10
PATIENT = {"lookup_timeout_s": 60.0, "store_bytes_in_flight_max": CHUNKS * CHUNK_BYTES}
QUICK_START = (REPOSITORY / "docs/quickstart-vllm-offloading.md").read_text()
PRINTED = QUICK_START.split("--kv-transfer-config '")[1].split("'")[0]  # each server starts with it
_PAGE_STEP_BYTES = 1 << 14
_ENGINE: dict[str, Any] = {}  # one as it is by default
_LONG = {"rope_type": "longrope", "original_max_position_embeddings": 1024}
WAYS: dict[str, dict[str, Any]] = {"arena": {}, "streams": {"pagestore": "remote", "host_id": "elsewhere"}}
_numbers = itertools.count()
_seeds = itertools.count(1)


def pages_of(cluster: DirectCluster) -> int:
    """In the memory of all pagestores."""

    async def count() -> int:
        found = 0
        for host in cluster.stores:
            control = PageStoreControl(cluster.settings(host)["pagestore"], ClientConfig())
            try:
                found += (await control.status()).staging_page_count
            finally:
                await control.close()
        return found

    return asyncio.run(count())


class VllmProcess:
    """A process with vLLM in it that has any number of servers' managers."""

    def __init__(self, log: Path, **variables: str) -> None:
        self._log = log.open("w+b")
        self._process = subprocess.Popen(
            [os.environ[VLLM_PYTHON_VARIABLE], "-m", "tests.vllm.tier_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=vllm_environment() | {"VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": "1"} | variables,
            cwd=REPOSITORY,
            text=True,
        )

    def __enter__(self) -> Self:
        assert self._line() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._log.seek(0)
        said = self._log.read().decode()
        self._log.close()
        assert "Failed to close" not in said, said  # vLLM could not unmap a region that a closed tier holds

    def call(self, server: str, command: str, arguments: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"server": server, "command": command, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        told = self._line()
        assert "error" not in told, told["error"]
        return told["answer"]

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise AssertionError(self._log.read().decode()[-3000:])
        return json.loads(line)


class Server:
    """One server of a process."""

    def __init__(self, process: VllmProcess, name: str) -> None:
        self._process, self._name = process, name

    def __call__(self, command: str, **arguments: Any) -> Any:
        return self._process.call(self._name, command, arguments)

    def store(self, seed: int, count: int = 4) -> dict[str, float]:
        counters: dict[str, float] = self("store", seed=seed, first=0, count=count)
        return counters

    def comes_back(self, seed: int, count: int = 4) -> int:
        """How many chunks do, after vLLM has evicted its own; their bytes are right, and no other group's."""
        self("forget")
        return self.found(seed, count)

    def found(self, seed: int, count: int = 4) -> int:
        """As `comes_back`, with what vLLM has."""
        told = self("look_up", seed=seed, first=0, count=count)
        assert (told["equal"], told["controls"]) == (told["hits"], 0)
        return int(told["hits"])


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmProcess, VllmProcess]]:
    directory = tmp_path_factory.mktemp("vllm")
    with VllmProcess(directory / "first.log") as first, VllmProcess(directory / "second.log") as second:
        yield first, second


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DirectCluster]:
    with direct_cluster(tmp_path_factory.mktemp("cluster"), "ab") as cluster:
        yield cluster


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of a host with a pagestore, and of one without."""
    return WAYS[request.param]


@contextmanager
def server(
    process: VllmProcess,
    settings: dict[str, Any],
    *,
    tp: int = 1,
    canonical: bool = False,
    engine: dict[str, Any] | None = _ENGINE,
    **tier: Any,
) -> Iterator[Server]:
    one = Server(process, f"server {next(_numbers)}")
    one(
        "open",
        engine_id=f"tier-test-{os.getpid()}-{next(_numbers)}",
        printed=PRINTED,
        tier={"model_revision": "r1", **PATIENT, **settings, **tier},
        chunk_count=CHUNKS,
        chunk_bytes=CHUNK_BYTES,
        tp=tp,
        canonical=canonical,
        engine=engine,
    )
    try:
        yield one
    finally:
        one("close")  # its region's file would stay in /dev/shm


def shared(one: Server, seed: int, count: int = 4) -> bool:
    """Whether all of it comes from the cluster; the index learns of new pages a moment later."""
    return one.comes_back(seed, count) == count


def test_the_quick_starts_json_is_complete_but_for_addresses_and_a_server_without_revision_does_not_start(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster
) -> None:
    with server(processes[0], {}) as one:  # nothing listens at its addresses
        assert one.store(next(_seeds))["cascade_job_failures"] == 1
        assert one.comes_back(next(_seeds)) == 0
    with (
        pytest.raises(AssertionError, match="model_revision"),
        server(processes[0], cluster.settings(), model_revision=""),
    ):
        raise NotImplementedError("it must not start")


def test_what_vllm_has_evicted_comes_back_with_its_bytes_and_no_other_prompts(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster, way: dict[str, Any]
) -> None:
    seed, other = next(_seeds), next(_seeds)
    with server(processes[0], cluster.settings(**way), enable_kv_events=True) as one:
        counters = one.store(seed)
        assert counters["stored_chunks"] == 4
        assert [4, "STORAGE", False] in one("events")
        assert one.comes_back(seed) == 4
        assert one.found(other) == 0
        counters = one("stats")
        assert counters["loaded_chunks"] == 4
        assert counters.get("promotion_job_failures", 0) == counters.get("cascade_job_failures", 0) == 0


def test_two_servers_share_and_a_server_that_starts_again_finds_what_was_stored(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster
) -> None:
    seed = next(_seeds)
    with server(processes[0], cluster.settings("a")) as one:
        one.store(seed)
    with server(processes[1], cluster.settings("b")) as two:
        eventually_sync(lambda: shared(two, seed))
    with server(processes[0], cluster.settings("a")) as again:
        assert again.found(seed) == 4


def test_hosts_with_and_without_a_pagestore_share_in_both_directions(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster
) -> None:
    seed, other = next(_seeds), next(_seeds)
    with (
        server(processes[0], cluster.settings("a")) as local,
        server(processes[1], cluster.settings(**WAYS["streams"])) as remote,
    ):
        local.store(seed)
        eventually_sync(lambda: shared(remote, seed))
        remote.store(other)
        eventually_sync(lambda: shared(local, other))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_revision": "r2"},
        {"salt": "x"},
        {"weight_version": "2"},
        {"tp": 2},
        {"engine": {"rope": {"rope_type": "yarn", "factor": 2.0}}},
        {"engine": {"overrides": {"attention_bias": True}}},
        {"engine": {"heads": 4}},
    ],
)
def test_servers_that_differ_in_what_kv_depends_on_share_nothing(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster, changes: dict[str, Any]
) -> None:
    seed = next(_seeds)
    with (
        server(processes[0], cluster.settings("a")) as one,
        server(processes[1], cluster.settings("a")) as same,
        server(processes[1], cluster.settings("a"), **changes) as other,
    ):
        one.store(seed)
        eventually_sync(lambda: shared(same, seed))
        assert other.found(seed) == 0


@pytest.mark.parametrize(
    ("engine", "same", "other"),
    [
        ({"conv": "SD"}, {"conv": "SD"}, {"conv": "DS"}),
        (
            {"rope": _LONG, "max_model_len": 1024},
            {"rope": _LONG, "max_model_len": 512},
            {"rope": _LONG, "max_model_len": 4096},
        ),
    ],
)
def test_kv_of_one_size_that_is_arranged_or_computed_otherwise_is_not_shared(
    processes: tuple[VllmProcess, VllmProcess],
    cluster: DirectCluster,
    engine: dict[str, Any],
    same: dict[str, Any],
    other: dict[str, Any],
) -> None:
    seed = next(_seeds)
    with (
        server(processes[0], cluster.settings("a"), engine=engine) as one,
        server(processes[1], cluster.settings("a"), engine=same) as two,
        server(processes[1], cluster.settings("a"), engine=other) as three,
    ):
        one.store(seed)
        eventually_sync(lambda: shared(two, seed))
        assert three.found(seed) == 0


def test_an_engine_of_which_nothing_is_known_shares_with_no_other(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster
) -> None:
    seed = next(_seeds)
    with (
        server(processes[0], cluster.settings("a"), engine=None) as one,
        server(processes[1], cluster.settings("a"), engine=None) as other,
    ):
        one.store(seed)
        assert one.comes_back(seed) == 4
        assert other.found(seed) == 0


@pytest.mark.parametrize("options", [{"store": False}, {"no such option": 1}])
def test_what_a_request_did_not_store_is_stored_by_the_next_one_that_has_it(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster, options: dict[str, Any]
) -> None:
    seed = next(_seeds)
    with (
        server(processes[0], cluster.settings("a")) as one,
        server(processes[1], cluster.settings("a")) as two,
    ):
        one("store", seed=seed, first=0, count=4, params={"kvpool": options})
        assert two.found(seed) == 0
        one.store(seed)
        eventually_sync(lambda: shared(two, seed))


def test_a_canonical_layout_is_shared_across_tensor_parallel_degrees(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster
) -> None:
    seed = next(_seeds)
    with (
        server(processes[0], cluster.settings("a"), canonical=True) as one,
        server(processes[1], cluster.settings("a"), canonical=True, tp=2) as two,
        server(processes[1], cluster.settings("a")) as direct,
    ):
        one.store(seed)
        eventually_sync(lambda: shared(two, seed))
        assert direct.found(seed) == 0


def test_another_seed_of_vllms_hashes_shares_nothing(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster, tmp_path: Path
) -> None:
    seed = next(_seeds)
    with (
        VllmProcess(tmp_path / "seeded.log", PYTHONHASHSEED="7") as seeded,
        server(processes[0], cluster.settings("a")) as one,
        server(seeded, cluster.settings("a")) as other,
    ):
        one.store(seed)
        assert other.found(seed) == 0


def test_a_reset_serves_nothing_from_before_and_shares_nothing_after(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster, way: dict[str, Any]
) -> None:
    seed, later = next(_seeds), next(_seeds)
    with (
        server(processes[0], cluster.settings("a", **way)) as one,
        server(processes[1], cluster.settings("a", **way)) as two,
    ):
        one.store(seed)
        eventually_sync(lambda: shared(two, seed))
        one("begin_store", seed=later, first=0, count=4)  # the reset finds its job running
        assert one("reset")["resets"] == 1
        assert one.found(seed) == one.found(later) == 0
        one.store(seed)  # of the new weights
        assert one.comes_back(seed) == 4
        third = next(_seeds)
        one.store(third)
        assert two.found(third) == 0


def test_what_only_this_process_can_find_goes_with_the_next_reset_and_at_the_end(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster, way: dict[str, Any]
) -> None:
    shared_seed, before = next(_seeds), pages_of(cluster)
    with server(processes[0], cluster.settings("a", **way)) as one:
        one.store(shared_seed)
        one("reset")
        for _ in range(2):
            one.store(next(_seeds))
            assert pages_of(cluster) == before + 4 + 4, "what others can find, and this epoch's own"
            one("reset")
            eventually_sync(lambda: pages_of(cluster) == before + 4)
        one.store(next(_seeds))
    assert pages_of(cluster) == before + 4
    with server(processes[1], cluster.settings("a", **way)) as two:
        assert two.comes_back(shared_seed) == 4


def test_with_a_weight_version_a_reset_keeps_what_is_stored(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster
) -> None:
    seed = next(_seeds)
    with server(processes[0], cluster.settings("a"), weight_version="7") as one:
        one.store(seed)
        one("reset")
        assert one.found(seed) == 4


def test_stores_beyond_the_bytes_in_flight_are_refused_and_pin_nothing(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster, way: dict[str, Any]
) -> None:
    seed = next(_seeds)
    settings = cluster.settings("a", **way, store_bytes_in_flight_max=2 * CHUNK_BYTES)
    with server(processes[0], settings) as one:
        counters = one.store(seed, CHUNKS)
        assert (counters["refused_store_chunks"], counters["cascade_job_failures"]) == (CHUNKS - 2, 1)
        assert one.store(next(_seeds), 2)["refused_store_chunks"] == CHUNKS - 2
        assert one.comes_back(seed, CHUNKS) == 2


def test_refused_chunks_are_stored_by_later_requests_that_have_them(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster, way: dict[str, Any]
) -> None:
    seed = next(_seeds)
    settings = cluster.settings("a", **way, store_bytes_in_flight_max=2 * CHUNK_BYTES)
    with server(processes[0], settings) as one:
        refused = [one.store(seed, CHUNKS)["refused_store_chunks"] for _ in range(CHUNKS // 2)]
        assert [after - before for before, after in itertools.pairwise(refused)] == [4, 2, 0]
        offered = one("stats")["known_store_chunks"]
        assert one.store(seed, CHUNKS)["known_store_chunks"] == offered, "of a region whose chunks are all stored"
        assert one.comes_back(seed, CHUNKS) == CHUNKS


def test_a_damaged_page_is_a_miss(
    processes: tuple[VllmProcess, VllmProcess], tmp_path: Path, way: dict[str, Any]
) -> None:
    seed = next(_seeds)
    with direct_cluster(tmp_path) as cluster:
        with server(processes[0], cluster.settings(**way)) as one:
            one.store(seed)
            asyncio.run(leave_staging(cluster.store().ready["endpoint"]))
            for path in tmp_path.rglob("*.pages"):
                with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                    for offset in range(_PAGE_STEP_BYTES // 2, len(memory), _PAGE_STEP_BYTES):
                        memory[offset] ^= 0xFF
                    memory.flush()
        with server(processes[1], cluster.settings(**way)) as two:
            assert two.found(seed) == 0
            assert two("stats")["missed_chunks"] == 4  # in one job or two, as look-ups were answered


def test_a_request_says_whether_it_is_stored_and_loaded(
    processes: tuple[VllmProcess, VllmProcess], tmp_path: Path, way: dict[str, Any]
) -> None:
    kept, refused, shared = (next(_seeds) for _ in range(3))
    with direct_cluster(tmp_path) as cluster:
        settings = cluster.settings(**way)
        with server(processes[0], settings) as one, server(processes[1], settings) as two:
            one("store", seed=kept, first=0, count=4, params={"kvpool": {"store": False}})
            assert one.found(kept) == 4, "in vLLM's own region"
            counters = one("store", seed=refused, first=0, count=4, params={"kvpool": {"prefetch": 1}})
            assert counters.get("cascade_job_failures", 0) == 0
            one("store", seed=shared, first=0, count=4, params={"kvpool": {"ttl_s": 600, "priority": 5}})
            assert two("look_up", seed=shared, first=0, count=4, params={"kvpool": {"load": False}})["hits"] == 0
            eventually_sync(lambda: two.found(shared) == 4)  # what the index has heard of
            assert [two.found(seed) for seed in (kept, refused)] == [0, 0]


def test_the_retention_of_a_request_reaches_chunks_that_are_stored(
    processes: tuple[VllmProcess, VllmProcess], cluster: DirectCluster, way: dict[str, Any]
) -> None:
    seed = next(_seeds)
    with server(processes[0], cluster.settings("a", **way)) as one:
        assert one.store(seed)["stored_chunks"] == 4
        assert one.store(seed)["stored_chunks"] == 4
        retained = one("store", seed=seed, first=0, count=4, params={"kvpool": {"priority": 5}})
        assert retained["stored_chunks"] == 8


def test_jobs_under_a_pagestore_that_stands_still_end_when_it_is_killed(
    processes: tuple[VllmProcess, VllmProcess], tmp_path: Path, way: dict[str, Any]
) -> None:
    seed = next(_seeds)
    with direct_cluster(tmp_path) as cluster, server(processes[0], cluster.settings(**way)) as one:
        one.store(seed)
        one("forget")
        cluster.store().send(signal.SIGSTOP)
        assert one("begin_load", seed=seed, first=0, count=4) == 4
        one("begin_store", seed=next(_seeds), first=0, count=4)
        cluster.store().kill()
        counters = one("settle")
        assert (counters["promotion_job_failures"], counters["cascade_job_failures"]) == (1, 1)
        assert one.found(seed) == 0


def test_a_reset_waits_no_longer_than_the_time_limits_of_a_pagestore_that_stands_still(
    processes: tuple[VllmProcess, VllmProcess], tmp_path: Path, way: dict[str, Any]
) -> None:
    limits: dict[str, Any] = dict.fromkeys(
        ("load_timeout_s", "store_timeout_s", "connect_timeout_s", "room_wait_s"), 0.5
    )
    with direct_cluster(tmp_path) as cluster, server(processes[0], cluster.settings(**way, **limits)) as one:
        eventually_sync(lambda: one.store(next(_seeds)).get("stored_chunks", 0) > 0)
        cluster.store().send(signal.SIGSTOP)
        try:
            one("begin_store", seed=next(_seeds), first=0, count=4)
            counters = one("reset")
        finally:
            cluster.store().send(signal.SIGCONT)
        assert counters["resets"] == 1 and counters["cascade_job_failures"] >= 1

        def serves_again() -> bool:
            seed = next(_seeds)
            one.store(seed)
            return shared(one, seed)

        eventually_sync(serves_again)


def test_a_pagestore_killed_in_the_middle_of_jobs_costs_misses_and_comes_back(
    processes: tuple[VllmProcess, VllmProcess], tmp_path: Path, way: dict[str, Any]
) -> None:
    seed, second, third = next(_seeds), next(_seeds), next(_seeds)
    with direct_cluster(tmp_path) as cluster, server(processes[0], cluster.settings(**way, load_timeout_s=5.0)) as one:
        one.store(seed)
        one("begin_store", seed=second, first=0, count=CHUNKS)
        cluster.store().kill()
        one("settle")  # every job ends, and once: vLLM's assertions end the manager otherwise
        assert one.comes_back(seed) == 0
        cluster.store().start()
        cluster.store().wait_ready()

        def serves_again() -> bool:
            one.store(third)
            return shared(one, third)

        eventually_sync(serves_again)
