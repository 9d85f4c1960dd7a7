"""The connector as vLLM calls it: whatever happens, what vLLM waits for ends, and nothing is raised."""

from __future__ import annotations

import abc
import importlib
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.connectors.vllm import compatibility, wiring
from kvpool.connectors.vllm.agent_selector import WorkerPlacement
from kvpool.connectors.vllm.disabled_connector import disabled_connector
from kvpool.connectors.vllm.step_jobs import StepJobs
from kvpool.core.errors import GeometryUnsupported, InvalidRequest
from tests.unit.connectors import vllm_modules
from tests.unit.connectors.vllm_jobs import a_load, a_store
from tests.unit.connectors.vllm_modules import BASE, Base, Role, a_config


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The connector's module over stand-ins of vLLM's."""
    vllm_modules.install(monkeypatch)
    imported = importlib.import_module("kvpool.connectors.vllm.connector")
    monkeypatch.setattr(wiring, "layer_numbers", lambda *_: {})
    return imported


def refused(*arguments: Any, **values: Any) -> Any:
    raise GeometryUnsupported("a hybrid model")


def jobs() -> StepJobs:
    load, store = a_load("a", (1, 2), end_chunk=1), a_store(7, "b", (3, 4), end_chunk=1)
    return StepJobs(step=1, loads=[load], stores=[store], release=["b"])


def test_a_worker_that_cannot_share_ends_every_order_of_a_scheduler_that_can(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wiring, "connector_worker", refused)
    connector = module.KvPoolConnector(a_config(), Role.WORKER, None)
    connector.register_kv_caches({})
    assert "a hybrid model" in caplog.text
    metadata = module.StepMetadata(jobs())
    connector.bind_connector_metadata(metadata)
    connector.handle_preemptions(metadata)
    connector.start_load_kv(None)
    connector.wait_for_save()
    assert connector.get_finished(set()) == ({"b"}, {"a"})
    assert connector.get_block_ids_with_load_errors() == {1, 2}
    report = connector.build_connector_worker_meta()
    assert (len(report.reports), report.ready) == (2, False)
    assert report.aggregate(module.WorkerReport(2, (), True)).ready is False


def test_trouble_in_every_call_is_logged_once_in_a_while_and_raised_never(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"planted {name}")

    broken = Broken()
    monkeypatch.setattr(wiring, "connector_worker", lambda *_, **__: (broken, lambda: None))
    monkeypatch.setattr(wiring, "connector_scheduler", lambda *_: (broken, lambda: None))
    worker = module.KvPoolConnector(a_config(), Role.WORKER, None)
    worker.register_kv_caches({})
    worker.bind_connector_metadata(module.StepMetadata(jobs()))
    connector = module.KvPoolConnector(a_config(), Role.SCHEDULER, None)
    monkeypatch.setattr(module, "_log_rate", module.LogRateLimiter())
    request = SimpleNamespace(request_id="r", status=SimpleNamespace(name="FINISHED_STOPPED"))
    for _ in range(3):
        assert worker.get_finished(set()) == (None, None)
        assert worker.get_block_ids_with_load_errors() == set()
        assert worker.build_connector_worker_meta() is None
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        assert connector.request_finished(request, []) == (False, None)
        assert connector.take_events() == ()
        assert connector.reset_cache() is False
        output = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None)
        assert connector.build_connector_meta(output).jobs.step == 0
    assert caplog.text.count("planted get_num_new_matched_tokens") == 1


def test_the_scheduler_gets_the_blocks_that_running_requests_were_given(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def build_jobs(scheduled: Any, preempted: Any, block_ids_of: Any, new_blocks: Any, checkpoints: Any) -> StepJobs:
        given.append(new_blocks)
        return StepJobs(step=1)

    side = SimpleNamespace(needs_new_blocks=True, build_jobs=build_jobs)
    monkeypatch.setattr(wiring, "connector_scheduler", lambda *_: (side, lambda: None))
    connector = module.KvPoolConnector(a_config(), Role.SCHEDULER, None)
    running = SimpleNamespace(
        req_ids=["a", "b", "c"],
        new_block_ids=[([1], [2, 3]), None, ([4], [5])],
        resumed_req_ids={"c"},  # admitted: vLLM has named them before
    )
    state = SimpleNamespace(get_block_ids=lambda request_id: ())
    output = SimpleNamespace(
        num_scheduled_tokens={},
        preempted_req_ids=None,
        kv_connector_block_state=state,
        scheduled_cached_reqs=running,
    )
    assert connector.build_connector_meta(output).jobs.step == 1
    # 9: of a request that was admitted and preempted in the same step, which is in no list.
    connector.build_connector_meta(SimpleNamespace(**vars(output), new_block_ids_to_zero=[2, 9]))
    assert given == [[1, 2, 3], [1, 2, 3, 2, 9]]


def test_after_a_step_that_was_not_built_no_block_is_taken_for_unchanged(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[bool] = []

    def build_jobs(*arguments: Any) -> Any:
        raise RuntimeError("planted")

    side = SimpleNamespace(needs_new_blocks=False, build_jobs=build_jobs, lose_new_blocks=lambda: lost.append(True))
    monkeypatch.setattr(wiring, "connector_scheduler", lambda *_: (side, lambda: None))
    connector = module.KvPoolConnector(a_config(), Role.SCHEDULER, None)
    state = SimpleNamespace(get_block_ids=lambda request_id: ())
    output = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, kv_connector_block_state=state)
    assert connector.build_connector_meta(output).jobs.step == 0
    assert lost == [True]


def test_layers_are_waited_for_only_where_a_failed_step_can_be_taken_back(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side = SimpleNamespace(get_num_new_matched_tokens=lambda request, held_tokens: 32)
    monkeypatch.setattr(wiring, "connector_scheduler", lambda *_: (side, lambda: None))
    waited: list[int] = []
    monkeypatch.setattr(wiring, "layer_numbers", lambda *_: {"layer": 0})
    worker_side = type("Side", (), {"wait_layers": lambda self, layers: waited.append(layers)})()
    monkeypatch.setattr(wiring, "connector_worker", lambda *_, **__: (worker_side, lambda: None))
    for batches, layerwise in ((1, True), (2, False)):
        config = a_config(batches=batches, layerwise=True)
        scheduler = module.KvPoolConnector(config, Role.SCHEDULER, None)
        assert scheduler.get_num_new_matched_tokens(object(), 0) == (32, not layerwise), (
            "a request waits for all or none"
        )
        worker = module.KvPoolConnector(config, Role.WORKER, None)
        worker.register_kv_caches({})
        waited.clear()
        worker.wait_for_layer_load("layer")
        assert waited == [1] * layerwise
    assert "--no-async-scheduling" in caplog.text


def test_a_scheduler_that_cannot_share_computes(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "connector_scheduler", refused)
    config = a_config()
    connector = module.KvPoolConnector(config, Role.SCHEDULER, None)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert connector.get_num_new_matched_tokens(object(), 0) == (0, False)
    assert connector.reset_cache() is True


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What vLLM imports, over stand-ins of its modules."""
    vllm_modules.install(monkeypatch)
    disabled_connector.cache_clear()
    yield importlib.import_module("kvpool.connectors.vllm")
    disabled_connector.cache_clear()


def old_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldRequest:
        def __init__(self) -> None:
            self.request_id = self.num_prompt_tokens = 0

    monkeypatch.setattr(sys.modules["vllm.v1.request"], "Request", OldRequest)


def moved_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules[BASE], "KVConnectorWorkerMetadata")


def new_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class NewBase(Base):
        @abc.abstractmethod
        def answer_something_new(self) -> None: ...

    monkeypatch.setattr(sys.modules[BASE], "KVConnectorBase_V1", NewBase)


@pytest.mark.parametrize(
    ("change", "lacking"),
    [
        (old_request, "OldRequest.num_in_flight_tokens"),
        (moved_metadata, "KVConnectorWorkerMetadata"),
        (new_call, "answer_something_new"),
    ],
)
def test_a_vllm_that_does_not_fit_runs_without_the_connector_which_says_why(
    package: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Any, lacking: str
) -> None:
    change(monkeypatch)
    for role in (Role.SCHEDULER, Role.WORKER):
        config = a_config()
        assert_nothing_is_shared(package.KvPoolConnector(config, role, None))
        assert config.kv_transfer_config.kv_load_failure_policy == "fail"  # vLLM's own
    (said,) = (record.getMessage() for record in caplog.records if "switched off" in record.getMessage())
    assert "vLLM 9.9" in said and lacking in said and compatibility.SUPPORTED in said


def test_a_bad_extra_config_stops_the_engine_whatever_vllm_it_is(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="agnet"):
        package.KvPoolConnector(a_config(agnet="unix:/x"), Role.SCHEDULER, None)
    old_request(monkeypatch)
    with pytest.raises(InvalidRequest, match="agnet"):
        package.KvPoolConnector(a_config(agnet="unix:/x"), Role.SCHEDULER, None)


def assert_nothing_is_shared(connector: Any) -> None:
    """As vLLM calls it, in either role; with a KV cache on a device that would not be found."""
    request = SimpleNamespace(request_id="r", status=SimpleNamespace(name="FINISHED_STOPPED"))
    connector.on_new_request(request) if callable(connector.on_new_request) else None
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1],)), 0)
    output = SimpleNamespace(num_scheduled_tokens={"r": 1}, preempted_req_ids=None)
    metadata = connector.build_connector_meta(output)
    assert metadata is not None
    if callable(connector.register_kv_caches):
        connector.register_kv_caches({"model.layers.0.self_attn": object()})
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)
    connector.wait_for_layer_load("model.layers.0.self_attn")
    connector.save_kv_layer("model.layers.0.self_attn", None, None)
    connector.wait_for_save()
    if callable(connector.get_finished):
        assert connector.get_finished({"r"}) == (None, None)
    assert connector.request_finished_all_groups(request, ([1],)) == (False, None)
    assert not connector.requires_kv_delivery


@pytest.mark.parametrize(
    ("model", "variables", "cure"),
    [
        ({"enable_sleep_mode": True}, {}, "--enable-sleep-mode"),
        ({"enable_cumem_allocator": True}, {}, "--enable-cumem-allocator"),
        ({}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"}, "expandable_segments"),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "cudaMallocAsync"),
    ],
)
def test_an_engine_whose_memory_no_agent_can_map_runs_without_the_connector_which_says_why(
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model: dict[str, bool],
    variables: dict[str, str],
    cure: str,
) -> None:
    monkeypatch.setattr(wiring, "connector_scheduler", refused)
    monkeypatch.setattr(wiring, "connector_worker", refused)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config: Any = a_config()
    config.model_config, config.device_config = SimpleNamespace(**model), SimpleNamespace(device_type="cuda")
    for role in (Role.SCHEDULER, Role.WORKER):
        connector = module.KvPoolConnector(config, role, None)
        assert_nothing_is_shared(connector)
        assert connector.get_block_ids_with_load_errors() == set()
        assert connector.build_connector_worker_meta() is None
        assert (connector.take_events(), connector.reset_cache()) == ((), True)
        connector.shutdown()
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"
    (line,) = (record.getMessage() for record in caplog.records)
    assert "switched off" in line and cure in line


def test_allocators_of_other_devices_do_not_count() -> None:
    config = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
    assert compatibility.disabled_reason(config, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}) == ""
    on_gpu = SimpleNamespace(device_config=SimpleNamespace(device_type="cuda"))
    assert (
        compatibility.disabled_reason(on_gpu, {"PYTORCH_ALLOC_CONF": "expandable_segments:False,backend:native"}) == ""
    )


def test_workers_say_which_agents_serve_them_also_of_a_pipeline(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def connector_worker(*arguments: Any, **options: Any) -> Any:
        *_, agents = arguments
        agents.select(WorkerPlacement(on_gpu=True, gpu="GPU-b"))
        return Side(), lambda: None

    class Side:
        pass

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(wiring, "connector_worker", connector_worker)
    worker = module.KvPoolConnector(a_config(), Role.WORKER, None)
    worker.register_kv_caches({})
    scheduler = module.KvPoolConnector(a_config(), Role.SCHEDULER, None)
    scheduler.set_xfer_handshake_metadata_pp_aware(
        {(1, 0): worker.get_handshake_metadata(), (0, 0): module.WorkerAgent("", "")}
    )
    assert "pp 1 tp 0 on GPU-b is served by unix:/x" in caplog.text
    assert "pp 0 tp 0 on a CPU is served by no agent yet" in caplog.text


def test_a_worker_that_stores_where_the_scheduler_does_not_look_is_named(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def connector_scheduler(*arguments: Any) -> Any:
        arguments[3].keyspaces = ("the scheduler's",)
        return SimpleNamespace(), lambda: None

    monkeypatch.setattr(wiring, "connector_scheduler", connector_scheduler)
    scheduler = module.KvPoolConnector(a_config(), Role.SCHEDULER, None)
    same, not_yet, other = (module.WorkerAgent("unix:/x", "", names) for names in (("the scheduler's",), (), ("b",)))
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): same, (0, 1): not_yet})
    assert "nothing will be loaded" not in caplog.text
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): same, (0, 1): other})
    assert "worker pp 0 tp 1 stores in keyspaces b, the scheduler looks in the scheduler's" in caplog.text


def test_a_child_of_a_multiconnector_hands_other_connectors_nothing(
    module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """MultiConnector gives what its first child says to all of them, and NIXL's connector raises for what is not its
    own."""
    caplog.set_level(logging.INFO)
    outer = a_config()
    made = vllm_modules.multi_connector().make
    worker = made(outer, a_config().kv_transfer_config, module.KvPoolConnector, Role.WORKER)
    assert worker.get_handshake_metadata() is None
    scheduler = made(outer, a_config().kv_transfer_config, module.KvPoolConnector, Role.SCHEDULER)
    caplog.clear()
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace(agent_metadata_bytes=b"")})
    assert not caplog.records


def test_a_hybrid_models_cache_manager_stays_on(module: Any) -> None:
    """vLLM turns it off for connectors that are not of this class; one that shares nothing must not cost that."""
    connector = module.KvPoolConnector(a_config(), Role.WORKER, None)
    assert isinstance(connector, sys.modules[BASE].SupportsHMA)
    assert connector.request_finished_all_groups(SimpleNamespace(request_id="r"), ([1], [2])) == (False, None)


class ScriptedScheduler:
    """What the connector says to a scheduler's side."""

    def __init__(self) -> None:
        self.ended_requests: list[str] = []
        self.received_requests: set[str] = set()

    def on_reports(self, ends: Any) -> None:
        self.ended_requests += [end.request_id for end in ends]

    def finished_recving(self, request_ids: Any) -> None:
        self.received_requests |= set(request_ids)


def a_pair(module: Any, monkeypatch: pytest.MonkeyPatch, workers: int) -> tuple[Any, ScriptedScheduler]:
    """The scheduler's connector of an engine whose worker, in this process, has a load that came in whole."""
    config = a_config()
    config.parallel_config.world_size = workers
    worker = SimpleNamespace(take_arrived=lambda: (SimpleNamespace(request_id="a"),))
    side = type("Side", (SimpleNamespace,), {"__hash__": object.__hash__})(**vars(worker))
    monkeypatch.setattr(wiring, "connector_worker", lambda *_, **__: (side, lambda: None))
    scheduler = ScriptedScheduler()
    monkeypatch.setattr(wiring, "connector_scheduler", lambda *_: (scheduler, lambda: None))
    worker_connector = module.KvPoolConnector(config, Role.WORKER, None)
    worker_connector.register_kv_caches({})
    connector = module.KvPoolConnector(config, Role.SCHEDULER, None)
    connector.worker_connector = worker_connector  # the registry does not keep its side alive
    return connector, scheduler


def test_vllm_goes_on_with_a_load_that_ended_in_its_own_process(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    connector, scheduler = a_pair(module, monkeypatch, workers=1)
    output = SimpleNamespace(kv_connector_worker_meta=None, finished_recving={"b"})
    connector.update_connector_output(output)
    assert output.finished_recving == {"a", "b"} == scheduler.received_requests
    assert scheduler.ended_requests == ["a"]


def test_with_several_workers_vllm_itself_says_what_all_have_received(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector, scheduler = a_pair(module, monkeypatch, workers=2)
    output = SimpleNamespace(kv_connector_worker_meta=None, finished_recving=None)
    connector.update_connector_output(output)
    assert output.finished_recving is None
    assert scheduler.ended_requests == []


@pytest.mark.parametrize(("block_tokens", "chunk_tokens"), [(512, 512), (528, 128)])
def test_chunks_are_as_long_as_the_checkpoints_of_recurrent_state_unless_set(
    block_tokens: int, chunk_tokens: int
) -> None:
    spec = type("MambaSpec", (), {"block_size": block_tokens})()
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    config = a_config()
    assert wiring.settings_from_config(config, caches).chunk_tokens == 32
    del config.kv_transfer_config.kv_connector_extra_config["chunk_tokens"]
    assert wiring.settings_from_config(config, caches).chunk_tokens == chunk_tokens
