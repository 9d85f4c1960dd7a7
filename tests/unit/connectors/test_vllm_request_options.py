"""What a request asks of the pool by kv_transfer_params."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpool.client.engine_items import EngineSource
from kvpool.connectors.vllm import wiring
from kvpool.connectors.vllm.request_options import RequestOptions
from kvpool.core.retention import PINNED_FOREVER_US, Retention
from tests.unit.connectors import vllm_modules
from tests.unit.connectors.vllm_fakes import FakePool, a_request
from tests.unit.connectors.vllm_jobs import CHUNK
from tests.unit.connectors.vllm_modules import Role, a_config
from tests.unit.connectors.vllm_worlds import BLOCKS, World

NOW_US = 1_000_000


def options(value: Any) -> RequestOptions:
    return RequestOptions.of({"kvpool": value}, lambda: NOW_US)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}, {"kvpool": {}}, "text"])
def test_a_request_that_asks_for_nothing_loads_and_stores(params: Any) -> None:
    assert RequestOptions.of(params, lambda: NOW_US) == RequestOptions(load=True, store=True)


@pytest.mark.parametrize(
    ("value", "retention"),
    [
        ({"ttl_s": 90}, Retention(ttl_ms=90_000)),
        ({"ttl_s": 0.5, "priority": -3}, Retention(ttl_ms=500, priority=-3)),
        ({"pin": True}, Retention(pinned_until_us=PINNED_FOREVER_US)),
        ({"pin": True, "ttl_s": 2}, Retention(ttl_ms=2000, pinned_until_us=3_000_000)),
        ({"pin": False, "priority": 0}, None),
    ],
)
def test_retention_is_read(value: Any, retention: Retention | None) -> None:
    assert options(value) == RequestOptions(retention=retention)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"stores": False, "load": True}, "has no 'stores'"),
        ({"load": 0}, "load must be true or false"),
        ({"ttl_s": True}, "ttl_s must be a number of seconds"),
        ({"ttl_s": "1h"}, "ttl_s must be a number of seconds"),
        ({"ttl_s": 0}, "ttl_s must be from"),
        ({"ttl_s": float("nan")}, "ttl_s must be from"),
        ({"ttl_s": 10**400}, "ttl_s must be from"),
        ({"priority": 1.5}, "priority must be a whole number"),
        ({"priority": 101}, "priority must lie in"),
        ({"p" * 10**6: 1}, "has no 'ppp"),
        ([], "must be an object"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name_and_the_request_only_computed(value: Any, named: str) -> None:
    refused = options(value)
    assert named in refused.refused
    assert len(refused.refused) < 200
    assert not refused.load
    assert not refused.store


def test_a_request_that_is_not_to_be_loaded_is_computed_and_stored() -> None:
    world = World(FakePool(2))
    request = a_request(100, kv_transfer_params={"kvpool": {"load": False}})
    assert world.match(request) == 0
    request.num_computed_tokens = 99
    assert world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    assert len(world.build().stores) == 1


@pytest.mark.parametrize("store", ["finish", "prefill"])
def test_a_request_that_is_not_to_be_stored_is_not(store: str) -> None:
    world = World(FakePool(2), store=store)
    request = a_request(200, kv_transfer_params={"kvpool": {"store": False}})
    assert world.match(request) == 2 * CHUNK
    assert world.build({"r": 136}).stores == []
    request.num_computed_tokens = 199
    assert not world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    assert world.build().stores == []


def test_a_retention_goes_with_the_store_of_all_chunks_those_in_the_pool_included() -> None:
    world = World(FakePool(2))
    request = a_request(200, kv_transfer_params={"kvpool": {"ttl_s": 60, "priority": 7}})
    world.match(request)
    request.num_computed_tokens = 199
    world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")
    (job,) = world.build().stores
    assert (job.first_chunk, job.end_chunk) == (0, 6)
    assert job.retention == Retention(ttl_ms=60_000, priority=7)


def test_a_refused_request_is_named_in_the_log_and_by_the_connector(caplog: pytest.LogCaptureFixture) -> None:
    world = World(FakePool(2))
    request = a_request(100, kv_transfer_params={"kvpool": {"prio": 1}})
    assert world.match(request) == 0
    assert "has no 'prio'" in caplog.text
    assert "has no 'prio'" in world.side.refusal("r")
    request.num_computed_tokens = 99
    assert not world.side.request_finished(request, [BLOCKS], "FINISHED_STOPPED")


def test_sources_of_a_hit_are_those_that_its_match_found() -> None:
    pool = FakePool(3)
    pool.source = EngineSource.DISK
    world = World(pool)
    world.load(a_request(120))
    assert world.side.expected_sources("r", 3 * CHUNK) == {EngineSource.DISK: 3 * CHUNK}
    assert world.side.expected_sources("r", CHUNK) == {EngineSource.DISK: CHUNK}
    assert world.side.expected_sources("another", CHUNK) == {}


@pytest.fixture
def connector_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    vllm_modules.install(monkeypatch)
    sources = ModuleType("vllm.v1.metrics.cache_hit_source")
    vars(sources)["CacheHitSource"] = SimpleNamespace(HOST="host", DISK="disk", P2P="p2p")
    monkeypatch.setitem(sys.modules, sources.__name__, sources)
    return importlib.import_module("kvpool.connectors.vllm.connector")


class Side:
    """A scheduler's side with one refused request and one load."""

    def refusal(self, request_id: str) -> str:
        return "has no prio" if request_id == "refused" else ""

    def request_finished(self, request: Any, block_ids: Any, status: str) -> bool:
        return False

    def expected_sources(self, request_id: str, token_count: int) -> dict[EngineSource, int]:
        found = {EngineSource.STAGING: 32, EngineSource.REMOTE: 16, EngineSource.GPU: 64}
        return found if request_id == "loaded" else {}


def test_the_output_of_a_refused_request_says_why(connector_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "connector_scheduler", lambda *_: (Side(), lambda: None))
    connector = connector_module.KvPoolConnector(a_config(), Role.SCHEDULER, None)
    status = SimpleNamespace(name="FINISHED_STOPPED")
    refused, other = (SimpleNamespace(request_id=name, status=status) for name in ("refused", "other"))
    assert connector.request_finished(refused, []) == (False, {"kvpool": {"refused": "has no prio"}})
    assert connector.request_finished(other, []) == (False, None)
    # Under MultiConnector two children that give the same key would stop the engine.
    make = vllm_modules.multi_connector().make
    child = make(a_config(), a_config().kv_transfer_config, connector_module.KvPoolConnector, Role.SCHEDULER)
    assert child.request_finished(refused, []) == (False, None)


def test_hits_are_counted_by_where_they_came_from(connector_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "connector_scheduler", lambda *_: (Side(), lambda: None))
    connector = connector_module.KvPoolConnector(a_config(), Role.SCHEDULER, None)
    request = SimpleNamespace(request_id="loaded")
    found = connector.get_external_cache_hit_sources(request, 112)
    assert found == {"host": 32, "p2p": 80}, "other hosts, and other GPUs of this one"
    unknown = connector.get_external_cache_hit_sources(SimpleNamespace(request_id="unknown"), 48)
    assert unknown == {"external_unspecified": 48}
