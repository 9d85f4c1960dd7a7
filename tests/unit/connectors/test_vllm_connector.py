"""The connector as vLLM calls it: whatever happens, what vLLM waits for ends, and nothing is raised."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.connectors.vllm import compatibility, wiring
from kvpool.connectors.vllm.orders import LoadOrder, StepOrders, StoreOrder, packed_blocks
from kvpool.core.errors import GeometryUnsupported, InvalidRequest
from tests.unit.connectors import vllm_modules
from tests.unit.connectors.vllm_modules import BASE, Role, a_config


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The connector's module over stand-ins of vLLM's."""
    vllm_modules.install(monkeypatch)
    imported = importlib.import_module("kvpool.connectors.vllm.connector")
    monkeypatch.setattr(wiring, "layer_numbers", lambda kv_caches: {})
    return imported


def refused(*arguments: Any, **values: Any) -> Any:
    raise GeometryUnsupported("a hybrid model")


def orders() -> StepOrders:
    load = LoadOrder(
        request_id="a",
        hashes=b"h" * 16,
        token_count=40,
        block_ids=packed_blocks((1, 2)),
        first_chunk=0,
        end_chunk=1,
        first_token=0,
        end_token=32,
        timeout_s=1.0,
    )
    store = StoreOrder(
        number=7,
        request_id="b",
        hashes=b"h" * 16,
        token_count=40,
        block_ids=packed_blocks((3, 4)),
        first_chunk=0,
        end_chunk=1,
    )
    return StepOrders(step=1, loads=[load], stores=[store], release=["b"])


def test_a_worker_that_cannot_share_ends_every_order_of_a_scheduler_that_can(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wiring, "worker_side", refused)
    connector = module.KvPoolConnector(a_config(), Role.WORKER, None)
    connector.register_kv_caches({})
    assert "a hybrid model" in caplog.text
    connector.bind_connector_metadata(module.StepMetadata(orders()))
    connector.handle_preemptions(connector._connector_metadata)
    connector.start_load_kv(None)
    connector.wait_for_save()
    assert connector.get_finished(set()) == ({"b"}, {"a"})
    assert connector.get_block_ids_with_load_errors() == {1, 2}
    report = connector.build_connector_worker_meta()
    assert (len(report.ends), report.ready) == (2, False)
    assert report.aggregate(module.WorkerReport(2, (), True)).ready is False


def test_trouble_in_every_call_is_logged_once_in_a_while_and_raised_never(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"planted {name}")

    connector = module.KvPoolConnector(a_config(), Role.WORKER, None)
    connector._worker = connector._scheduler = Broken()
    connector.bind_connector_metadata(module.StepMetadata(orders()))
    monkeypatch.setattr(module, "_seldom", module.Seldom())
    request = SimpleNamespace(request_id="r", status=SimpleNamespace(name="FINISHED_STOPPED"))
    for _ in range(3):
        assert connector.get_finished(set()) == (None, None)
        assert connector.get_block_ids_with_load_errors() == set()
        assert connector.build_connector_worker_meta() is None
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        assert connector.request_finished(request, []) == (False, None)
        assert connector.take_events() == ()
        assert connector.reset_cache() is False
        output = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None)
        assert connector.build_connector_meta(output).orders.step == 0
    assert caplog.text.count("planted matched_tokens") == 1


def test_layers_are_waited_for_only_where_a_failed_step_can_be_taken_back(
    module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert module.KvPoolConnector(a_config(layerwise=True), Role.WORKER, None)._settings.layerwise
    assert not module.KvPoolConnector(a_config(batches=2, layerwise=True), Role.WORKER, None)._settings.layerwise
    assert "--no-async-scheduling" in caplog.text


def test_a_scheduler_that_cannot_share_computes(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "scheduler_side", refused)
    connector = module.KvPoolConnector(a_config(), Role.SCHEDULER, None)
    assert connector._kv_transfer_config.kv_load_failure_policy == "recompute"
    assert connector.get_num_new_matched_tokens(object(), 0) == (0, False)
    assert connector.reset_cache() is True


def test_a_vllm_without_what_is_needed_is_refused_by_name(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class OldRequest:
        def __init__(self) -> None:
            self.request_id = self.num_prompt_tokens = 0

    monkeypatch.setattr(sys.modules["vllm.v1.request"], "Request", OldRequest)
    with pytest.raises(InvalidRequest, match=r"vLLM 9\.9.*OldRequest\.num_in_flight_tokens") as refusal:
        module.KvPoolConnector(a_config(), Role.WORKER, None)
    assert compatibility.TESTED in str(refusal.value)


def test_a_vllm_whose_modules_are_others_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_modules.install(monkeypatch)
    monkeypatch.delattr(sys.modules[BASE], "KVConnectorWorkerMetadata")
    package = importlib.import_module("kvpool.connectors.vllm")
    with pytest.raises(ImportError, match=r"vLLM 9\.9.*KVConnectorWorkerMetadata"):
        _ = package.KvPoolConnector
