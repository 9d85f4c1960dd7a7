"""What the connector reads of vLLM's configuration, alone and as one of several connectors."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.connectors.vllm.engine_introspection import (
    StepStart,
    WeightsEpoch,
    WeightVersion,
    kinds_of_kv,
    loads_wait_for_work,
    required_kv_cache_layout,
    zeroes_loaded_blocks,
)
from kvpool.connectors.vllm.settings import VllmSettings
from tests.fixtures.patience import PATIENCE_S
from tests.fixtures.recorded_vllm import install
from tests.unit.connectors import vllm_modules
from tests.unit.connectors.vllm_fakes import FakePool, a_request
from tests.unit.connectors.vllm_modules import Role, VllmConfig, a_config
from tests.unit.connectors.vllm_worlds import World


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The connector's module over stand-ins of vLLM's."""
    vllm_modules.install(monkeypatch)
    return importlib.import_module("kvpool.connectors.vllm.connector")


def several(**values: Any) -> VllmConfig:
    """Of an engine with several connectors; its own extra config is MultiConnector's."""
    config = a_config()
    config.kv_transfer_config = SimpleNamespace(
        **{"is_kv_consumer": True, "kv_load_failure_policy": "fail", "kv_connector_extra_config": {}, **values}
    )
    return config


@pytest.mark.parametrize(
    ("batches", "speculation", "waits"),
    [
        (1, None, False),  # steps are serial
        (2, None, False),  # vLLM's own fence
        (2, "ngram", False),
        (1, "eagle", True),  # a draft's KV is written after what vLLM takes for the end of a step
        (2, "mtp", True),
        (2, "draft_model", True),
    ],
)
def test_loads_wait_only_for_work_that_may_write_to_their_blocks(
    batches: int, speculation: str | None, waits: bool
) -> None:
    config = a_config(batches=batches)
    config.speculative_config = SimpleNamespace(method=speculation) if speculation else None
    assert loads_wait_for_work(config, config, is_fenced=True) is waits


@pytest.mark.parametrize(
    ("needs_zeroing", "asks", "zeroes"),
    [(True, False, True), (True, True, False), (False, False, False)],
)
def test_loads_wait_where_vllm_zeroes_their_blocks(needs_zeroing: bool, asks: bool, zeroes: bool) -> None:
    connector = type("Connector", (), {"get_loaded_kv_cache_group_ids": lambda self, request: (0,)} if asks else {})
    config = SimpleNamespace(needs_kv_cache_zeroing=needs_zeroing)
    assert zeroes_loaded_blocks(config, connector) is zeroes
    assert not zeroes_loaded_blocks(SimpleNamespace(), connector)


@pytest.mark.parametrize(("release", "zeroes"), [("0.31.0", True), ("0.32.0", False), ("0.33.0", False)])
def test_only_the_first_release_zeroes_blocks_of_loads(
    monkeypatch: pytest.MonkeyPatch, release: str, zeroes: bool
) -> None:
    install(monkeypatch, release)
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base").KVConnectorBase_V1
    assert zeroes_loaded_blocks(SimpleNamespace(needs_kv_cache_zeroing=True), base) is zeroes


class MambaSpec:
    def __init__(self, *dtypes: str) -> None:
        self.dtypes, self.mamba_type = dtypes, "mamba2"


class FullAttentionSpec:
    def __init__(self, dtype: str, heads: int) -> None:
        self.dtype, self.num_kv_heads, self.sliding_window = dtype, heads, None


class UniformSpecs:
    def __init__(self, *layers: Any) -> None:
        self.kv_cache_specs = {str(number): layer for number, layer in enumerate(layers)}


def kinds(*specs: Any) -> Any:
    """As a secondary tier finds them, which vLLM's connector creates."""

    def connector(kv_cache_config: Any) -> Any:
        return kinds_of_kv()

    return connector(SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]))


def test_kv_of_one_size_and_other_elements_is_told_apart() -> None:
    attention = FullAttentionSpec("bfloat16", 8)
    states = [kinds(attention, MambaSpec(*dtypes)) for dtypes in (("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "bf16"))]
    assert len({str(one) for one in states}) == 3
    assert kinds(attention, MambaSpec("bf16", "fp32")) == states[0]
    assert kinds(FullAttentionSpec("float16", 8)) != kinds(attention)
    assert kinds(FullAttentionSpec("bfloat16", 4)) == kinds(attention), "another TP degree"
    assert kinds(UniformSpecs(attention, FullAttentionSpec("bfloat16", 2))) == kinds(UniformSpecs(attention))
    assert kinds_of_kv() is None


def test_without_vllms_fence_loads_wait_where_steps_overlap() -> None:
    assert loads_wait_for_work(a_config(batches=2), several(), is_fenced=False)
    assert not loads_wait_for_work(a_config(batches=1), several(), is_fenced=False)


def test_an_engine_that_is_switched_off_keeps_its_own_layout(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    config = a_config()
    config.device_config = SimpleNamespace(device_type="cuda")
    assert module.KvPoolConnector.get_required_kvcache_layout(config) is None


def test_without_a_consumer_vllm_has_no_fence() -> None:
    """MultiConnector's own role counts, not that of its child."""
    assert loads_wait_for_work(a_config(batches=2), several(is_kv_consumer=False), is_fenced=True)
    assert not loads_wait_for_work(a_config(batches=2), several(), is_fenced=True)


@pytest.mark.parametrize(
    ("extra", "device", "alone", "beside_others"),
    [
        ({}, "cuda", "BLHNC", None),
        ({}, "cpu", None, None),
        ({"kv_cache_layout": "none"}, "cuda", None, None),
        ({"kv_cache_layout": "LBHNC"}, "cuda", "LBHNC", "LBHNC"),
        ({"kv_cache_layout": "wrong"}, "cuda", None, None),
    ],
)
def test_a_block_major_layout_is_asked_for_where_nobody_else_asks(
    module: Any, extra: dict[str, Any], device: str, alone: str | None, beside_others: str | None
) -> None:
    config, outer = a_config(**extra), several()
    config.device_config = outer.device_config = SimpleNamespace(device_type=device)
    assert module.KvPoolConnector.get_required_kvcache_layout(config) == alone
    multi = vllm_modules.multi_connector()
    assert multi.layout(outer, config.kv_transfer_config, module.KvPoolConnector) == beside_others


def test_failed_loads_are_recomputed_also_beside_other_connectors(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler goes by MultiConnector's configuration, of which the child has a copy with its own part."""
    monkeypatch.setattr(module.wiring, "connector_scheduler", lambda *_: (SimpleNamespace(), lambda: None))
    outer = several()
    vllm_modules.multi_connector().make(outer, a_config().kv_transfer_config, module.KvPoolConnector, Role.SCHEDULER)
    assert outer.kv_transfer_config.kv_load_failure_policy == "recompute"


class Core:
    """vLLM's engine core, as far as a connector sees it."""

    def __init__(self, connector: Any) -> None:
        self.scheduler, self.connector, self.version = object(), connector, "default"

    def get_weight_version(self) -> str:
        return self.version

    def add_request(self) -> None:
        self.connector()


def test_the_weight_version_is_found_where_vllm_keeps_it() -> None:
    version = WeightVersion()
    assert version() is None
    version.find_engine_core()
    assert version() is None, "no engine core calls here"
    core = Core(version.find_engine_core)
    core.add_request()
    assert version() == "default"
    core.version = "step 7"
    assert version() == "step 7"


def test_engines_share_by_the_version_of_their_weights_and_alone_without_one() -> None:
    core = Core(None)
    epoch, replica = WeightsEpoch(core.get_weight_version), WeightsEpoch(core.get_weight_version)
    assert epoch.epoch() == replica.epoch() == b""
    for one in (epoch, replica):
        one.reset()  # vLLM resets first, then takes new weights, then their version
    assert len(epoch.epoch()) == 16
    assert epoch.epoch() != replica.epoch()
    core.version = "7"
    seventh = epoch.epoch()
    assert seventh == replica.epoch()
    assert len(seventh) == 16
    assert "version 7" in epoch.shared_with()
    epoch.reset()
    assert epoch.epoch() not in (seventh, replica.epoch()), "the version may not be set again"
    assert "no other" in epoch.shared_with()
    core.version = "8"
    assert epoch.epoch() == replica.epoch() != seventh
    core.version = "default"
    assert epoch.epoch() != replica.epoch()


def test_requests_follow_the_version_of_the_weights() -> None:
    core = Core(None)
    world = World(FakePool(3), weights=WeightsEpoch(core.get_weight_version))
    waiting, running = a_request(120, "waiting"), a_request(120, "running")
    assert [world.match(request) for request in (waiting, running)] == [96, 96]
    running.num_computed_tokens = 64
    core.version = "2"
    assert world.side.get_num_new_matched_tokens(waiting, 0) == 96
    assert world.side.get_num_new_matched_tokens(running, 0) == 0, "its KV is of both weights"
    before, _, after = (chain.hashes for chain, _ in world.connection.pool.asked)
    assert not set(before) & set(after)


def test_no_layout_is_asked_for_beside_recurrent_state() -> None:
    config: Any = a_config()
    config.model_config = SimpleNamespace(is_hybrid=True)
    settings = VllmSettings(agent="unix:/x")
    assert required_kv_cache_layout(settings, config, config) is None
    config.model_config.is_hybrid = False
    assert required_kv_cache_layout(settings, config, config) == "BLHNC"


class ModelRunner:
    """Executes steps on a thread of its own and tells of them late, as vLLM's second model runner."""

    def __init__(self, start: StepStart) -> None:
        self._start, self._thread = start, ThreadPoolExecutor(1)

    def __enter__(self) -> ModelRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def execute_model(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        before()  # blocks are zeroed
        self._start.step_begins()
        after()

    async def step(
        self, before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self.execute_model, before, after)
        self._start.step_ends()


async def waits(passed: asyncio.Task[None]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not passed.done()


async def test_a_step_that_has_begun_is_waited_for_until_the_connector_knows_it() -> None:
    start, begun, told = StepStart(), threading.Event(), threading.Event()

    def zero_blocks() -> None:
        begun.set()
        assert told.wait(PATIENCE_S)

    with ModelRunner(start) as runner:
        await runner.step()
        step = asyncio.create_task(runner.step(zero_blocks))
        await asyncio.to_thread(begun.wait)
        passed = asyncio.create_task(start.passed())
        assert await waits(passed)
        told.set()
        await asyncio.wait_for(passed, PATIENCE_S)
        await step


async def test_nothing_is_waited_for_between_two_steps_and_once_a_step_is_known() -> None:
    start, known, end = StepStart(), threading.Event(), threading.Event()
    await start.passed()  # no step yet

    def compute() -> None:
        known.set()
        assert end.wait(PATIENCE_S)

    with ModelRunner(start) as runner:
        await runner.step()
        await start.passed()
        step = asyncio.create_task(runner.step(after=compute))
        await asyncio.to_thread(known.wait)
        await start.passed()
        end.set()
        await step


async def test_a_model_runner_of_another_kind_is_waited_for_until_its_next_step() -> None:
    start = StepStart()
    start.step_begins()
    await start.passed()
    start.step_ends()
    passed = asyncio.create_task(start.passed())
    assert await waits(passed)
    start.step_begins()
    await asyncio.wait_for(passed, PATIENCE_S)
