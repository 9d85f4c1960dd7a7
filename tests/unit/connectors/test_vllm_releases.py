"""The connector and the tier fit each vLLM release whose interface is recorded."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvpool.connectors.vllm
from kvpool.client import streaming_copy
from kvpool.core.errors import InvalidRequest
from tests.fixtures.recorded_vllm import RELEASES, install, recorded

SOURCE = Path(kvpool.connectors.vllm.__file__).parent
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
TIERING = "vllm.v1.kv_offload.tiering.base"
ADDRESSES = {"index_endpoints": ["127.0.0.1:7100"], "pagestore": "unix:/run/kvpool/pagestore.sock"}
# vLLM asks for what needs it only since there is one.
SINCE = {"vllm.v1.metrics.cache_hit_source.CacheHitSource": "0.32.0"}


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    install(monkeypatch, request.param)
    yield request.param
    for loaded in [name for name in sys.modules if name.startswith("kvpool.connectors.vllm.")]:
        del sys.modules[loaded]


def module(name: str) -> Any:
    return importlib.import_module(f"kvpool.connectors.vllm.{name}")


def refused_calls(ours: type, theirs: dict[str, Any]) -> list[str]:
    """Methods that we have in the place of theirs, and that do not take what vLLM gives."""
    refused = []
    for name, parameters in theirs["calls"].items():
        own = vars(ours).get(name)
        if own is None or name.startswith("__"):
            continue
        given = [one for one in parameters if not one.startswith("*")]
        try:
            inspect.signature(getattr(own, "__func__", own)).bind("self", *given)
        except TypeError:
            refused.append(f"{name}({', '.join(parameters)})")
    return refused


def test_four_releases_are_recorded() -> None:
    assert RELEASES == ["0.30.0", "0.31.0", "0.32.0", "0.33.0"]


@pytest.mark.parametrize("release", RELEASES)
def test_all_that_is_imported_of_vllm_is_there(release: str) -> None:
    there = {f"{name}.{one}" for name, names in recorded(release).items() for one in names}
    wanted = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm."):
                wanted |= {f"{node.module}.{one.name}" for one in node.names}
    modules = {name.rpartition(".")[0] + "." + name.rpartition(".")[2] for name in recorded(release)}
    lacking = {one for one in wanted - there - modules if one != f"{BASE.rpartition('.')[0]}.base"}
    assert lacking == {name for name, first in SINCE.items() if release < first}


def test_the_connector_fits(release: str) -> None:
    connector = module("connector").KvPoolConnector
    refused = module("compatibility").incompatibility(connector)
    if release == "0.30.0":  # it does not call wait_for_save in steps that compute nothing
        assert "does not fit vLLM 0.30.0: there is no VllmConfig.num_prefill_lookahead_tokens" in refused
        return
    assert refused == ""
    for theirs in ("KVConnectorBase_V1", "SupportsHMA"):
        assert refused_calls(connector, recorded(release)[BASE][theirs]) == []


def test_the_fence_of_freed_blocks_is_looked_for(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    defers = module("compatibility").defers_freeing_blocks
    assert defers()
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler")
    monkeypatch.setattr(scheduler, "Scheduler", type("Scheduler", (), {}))
    assert not defers()
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.scheduler", None)  # an import of None fails
    assert not defers()


def test_what_a_release_asks_for_and_we_lack_is_found(release: str) -> None:
    connector = module("connector").KvPoolConnector
    theirs = recorded(release)[BASE]["KVConnectorBase_V1"]
    changed = {**theirs, "calls": {**theirs["calls"], "wait_for_layer_load": ["layer_name", "stream"]}}
    assert refused_calls(connector, changed) == ["wait_for_layer_load(layer_name, stream)"]


def test_the_tier_starts_and_takes_its_calls(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_copy, "_kernel", None)
    manager = module("tier.manager")
    tier_class, names = manager.KvPoolTier, {"model_name": "org/model"}
    files = SimpleNamespace(from_offloading_spec=lambda *_, **__: SimpleNamespace(get_run_config=lambda: names))
    monkeypatch.setattr(manager, "FileMapper", files)
    assert refused_calls(tier_class, recorded(release)[TIERING]["SecondaryTierManager"]) == []
    region = memoryview(bytearray(8 * 64)).cast("b", (8, 64))
    config = SimpleNamespace(
        canonical_layout=False,
        replicated_layout=False,
        groups=[],
        worker_kv_bytes_per_block=64,
        kv_cache_layout="LBNHC",
        parallel=SimpleNamespace(data_parallel_size=1),
    )
    events = SimpleNamespace(enable_kv_cache_events=False)
    spec = SimpleNamespace(kv_events_config=events, config=config, blocks_per_chunk=1)
    names["model_name"] = "m" * 2000
    with pytest.raises(InvalidRequest, match="model_id"):  # at the start, not in a step
        tier_class(spec, region, "KvPoolTier", model_revision="1", **ADDRESSES)
    names["model_name"] = "org/model"
    tier = tier_class(spec, region, "KvPoolTier", model_revision="1", **ADDRESSES)  # nothing abstract is left
    tier.shutdown()
    assert streaming_copy._kernel is not None, "its large copies would go through the caches"


def test_results_of_jobs_say_what_the_release_asks_for(release: str) -> None:
    from vllm.v1.kv_offload.tiering.base import JobResult

    made = module("releases").job_result(JobResult, job_id=3, success=True, transfer_bytes=64)
    assert (made.job_id, made.success, getattr(made, "transfer_bytes", 64)) == (3, True, 64)


@pytest.mark.parametrize(
    ("engines", "fields", "may_wait"), [(1, "new_req_ids", True), (2, "new_req_ids", False), (1, "", False)]
)
def test_steps_wait_where_vllm_says_what_it_has_scheduled_and_no_engine_waits_for_them(
    engines: int, fields: str, may_wait: bool
) -> None:
    spec = SimpleNamespace(config=SimpleNamespace(parallel=SimpleNamespace(data_parallel_size=engines)))
    context = namedtuple("ScheduleEndContext", fields)  # type: ignore[misc]
    assert module("releases").steps_may_wait(spec, context) is may_wait
    assert not module("releases").steps_may_wait(SimpleNamespace(), context)
