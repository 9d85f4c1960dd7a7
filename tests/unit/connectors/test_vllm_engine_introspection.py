"""What the connector reads of vLLM's configuration, alone and as one of several connectors."""

from __future__ import annotations

import asyncio
import copy
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.connectors.vllm.engine_introspection import (
    StepStart,
    WeightsEpoch,
    WeightVersion,
    configs_of_caller,
    loads_wait_for_work,
    required_kv_cache_layout,
    step_arrives,
    zeroes_loaded_blocks,
)
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.connectors.vllm.step_jobs import StepJobs
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


def test_a_tier_reads_the_configurations_that_the_connector_above_it_was_given() -> None:
    given = SimpleNamespace(model_config=1), SimpleNamespace(kv_cache_groups=[])

    def tier() -> Any:
        return configs_of_caller()

    def connector(vllm_config: Any, kv_cache_config: Any) -> Any:
        return tier()

    assert connector(*given) == given
    assert connector(given[0], None) is None and tier() is None


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


def a_start() -> tuple[StepStart, StepJobs]:
    """One that knows of its scheduler's first step, and that step."""
    start, first = StepStart(), StepJobs(step=1, scheduler="a")
    step_arrives(first)
    start.step_begins(first)
    return start, first


async def waits(passed: asyncio.Task[bool]) -> bool:
    for _ in range(5):
        await asyncio.sleep(0)
    return not passed.done()


@pytest.fixture
def no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stacks of other threads are not read: CPython 3.11 may return frames that have been freed, if a garbage
    collection runs Python meanwhile, and then an engine's process is killed by a segmentation fault."""

    def read() -> None:
        raise AssertionError("the stack of a running thread was read")

    monkeypatch.setattr(sys, "_current_frames", read)


@pytest.mark.usefixtures("no_stacks")
async def test_a_step_whose_jobs_have_arrived_is_waited_for_until_the_connector_knows_it() -> None:
    start, first, second = StepStart(), StepJobs(step=1, scheduler="a"), StepJobs(step=2, scheduler="a")
    step_arrives(first)
    start.step_begins(first)
    await start.passed()
    step_arrives(second)  # from here on its blocks may be zeroed
    passed = asyncio.create_task(start.passed())
    assert await waits(passed)
    start.step_begins(second)
    await asyncio.wait_for(passed, PATIENCE_S)
    await start.passed()


@pytest.mark.usefixtures("no_stacks")
async def test_nothing_is_waited_for_before_the_first_step_nor_for_other_engines_of_the_process() -> None:
    start, other = StepStart(), StepStart()
    jobs, its = StepJobs(step=1, scheduler="a"), StepJobs(step=1, scheduler="another")
    step_arrives(jobs)
    step_arrives(its)
    await start.passed()
    start.step_begins(jobs)
    await start.passed()
    other.step_begins(its)
    step_arrives(StepJobs(step=2, scheduler="a"))
    await other.passed()


@pytest.mark.usefixtures("no_stacks")
async def test_each_rank_of_a_process_is_to_be_notified_itself() -> None:
    ranks = StepStart(), StepStart()
    first, second = StepJobs(step=1, scheduler="a"), StepJobs(step=2, scheduler="a")
    for rank in ranks:
        step_arrives(first)
        rank.step_begins(first)
    step_arrives(second)
    ranks[0].step_begins(second)
    await ranks[0].passed()
    passed = asyncio.create_task(ranks[1].passed())
    assert await waits(passed)
    ranks[1].step_begins(second)
    await asyncio.wait_for(passed, PATIENCE_S)


@pytest.mark.usefixtures("no_stacks")
async def test_after_a_step_that_has_failed_it_is_not_known_what_was_written() -> None:
    start, _ = a_start()
    second = StepJobs(step=2, scheduler="a")
    step_arrives(second)
    passed = asyncio.create_task(start.passed())
    assert await waits(passed)
    del second
    assert not await asyncio.wait_for(passed, PATIENCE_S)
    assert not await start.passed()  # nor later
    third = StepJobs(step=3, scheduler="a")
    step_arrives(third)
    assert start.misses_steps(third)
    start.step_begins(third)
    assert await start.passed()
    assert not start.misses_steps(StepJobs(step=4, scheduler="a"))
    assert not start.misses_steps(StepJobs(step=9, scheduler="another"))


@pytest.mark.usefixtures("no_stacks")
async def test_a_failed_step_hides_no_step_before_it() -> None:
    start, first = a_start()
    second, third = StepJobs(step=2, scheduler="a"), StepJobs(step=3, scheduler="a")
    step_arrives(second)
    step_arrives(third)
    del third
    assert not await asyncio.wait_for(start.passed(), PATIENCE_S)
    assert second.arrival == first.arrival + 1


@pytest.mark.usefixtures("no_stacks")
async def test_steps_that_arrive_later_are_not_waited_for() -> None:
    """With pipeline parallelism a step arrives in nearly every moment."""
    start, _ = a_start()
    second, third = StepJobs(step=2, scheduler="a"), StepJobs(step=3, scheduler="a")
    step_arrives(second)
    passed = asyncio.create_task(start.passed())
    assert await waits(passed)
    start.step_begins(second)
    step_arrives(third)
    assert await asyncio.wait_for(passed, PATIENCE_S)


@pytest.mark.usefixtures("no_stacks")
@pytest.mark.parametrize("of_another_process", [False, True])
async def test_the_metadata_of_a_step_says_itself_that_it_has_arrived(module: Any, of_another_process: bool) -> None:
    scheduler, start = module.KvPoolConnector(a_config(), Role.SCHEDULER, None), StepStart()

    def arrived() -> Any:
        sent = scheduler.build_connector_meta(SimpleNamespace())  # it fails: any block may be written then
        return copy.deepcopy(sent) if of_another_process else sent  # by the methods that pickling calls

    first = arrived()
    start.step_begins(first.jobs)
    await start.passed()
    second = arrived()
    passed = asyncio.create_task(start.passed())
    assert await waits(passed)
    start.step_begins(second.jobs)
    await asyncio.wait_for(passed, PATIENCE_S)
