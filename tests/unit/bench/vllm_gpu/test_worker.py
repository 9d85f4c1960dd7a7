"""What bench.vllm_gpu does inside a worker, without one."""

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.vllm_gpu.faults import transfers, under_way
from bench.vllm_gpu.worker import Aim, CallTrace, HeadWatch, store_burst
from kvpool.connectors.vllm.step_jobs import StepJobs, StoreJob, StoreReport


@dataclass
class Side:
    """A connector's worker that stores at once."""

    orders: list[StoreJob] = field(default_factory=list)
    failed_chunks: int = 0
    _settings: Any = field(default_factory=lambda: SimpleNamespace(chunk_tokens=128))

    def start_stores(self, orders: StepJobs) -> None:
        self.orders += orders.stores

    def take_reports(self) -> tuple[StoreReport, ...]:
        if not self.orders:
            return ()
        return tuple(
            StoreReport(
                number=order.number,
                stored_chunks=order.end_chunk - self.failed_chunks,
                deduplicated_chunks=0,
                failed_chunks=self.failed_chunks,
                duration_s=0.1,
                size_bytes=(order.end_chunk - self.failed_chunks) * 1000,
            )
            for order in self.orders
        )


def test_a_burst_stores_each_block_once_and_never_vllms_own() -> None:
    side = Side()
    stored = store_burst(side, requests=3, tokens=1024, block_tokens=16, block_count=193)
    blocks = [block for order in side.orders for block in order.block_ids.tolist()]
    assert sorted(blocks) == list(range(1, 193))
    assert len({order.hashes for order in side.orders}) == 3
    assert (stored["chunks"], stored["bytes"], stored["failed_chunks"]) == (24, 24_000, 0)


def test_a_burst_counts_what_was_not_stored() -> None:
    stored = store_burst(Side(failed_chunks=2), requests=2, tokens=512, block_tokens=16, block_count=100)
    assert (stored["chunks"], stored["bytes"], stored["failed_chunks"]) == (4, 4_000, 4)


def test_a_burst_larger_than_the_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="3 x 1024 tokens"):
        store_burst(Side(), requests=3, tokens=1024, block_tokens=16, block_count=192)


def connector() -> type:
    """A class with the methods that are traced; one load and one store a step."""

    class Connector:
        def __init__(self) -> None:
            load: Any = SimpleNamespace(request_id="a")
            store: Any = SimpleNamespace(number=7, first_chunk=0, end_chunk=2)
            self._connector_metadata = SimpleNamespace(jobs=StepJobs(step=1, loads=[load], stores=[store]))

        def _nothing(self, *arguments: object) -> None:
            return

        on_new_request = get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = _nothing
        start_load_kv = wait_for_save = get_finished = build_connector_worker_meta = _nothing

    return Connector


def test_a_process_is_killed_after_the_order_that_was_aimed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    made: Any = connector()
    trace, engine = CallTrace(made, object), made()
    trace.aim = Aim(1234, "store", skip=1, delay_s=0.0)
    engine.start_load_kv()
    engine.wait_for_save()
    assert [what for _, what, _, _ in trace.take()] == ["load asked", "load ordered", "store ordered"]
    trace.aim = Aim(1234, "store", skip=1, delay_s=0.0)
    for _ in range(3):
        engine.start_load_kv()
        engine.wait_for_save()
    calls = trace.take()
    assert killed == [(1234, signal.SIGKILL)]
    second = [at_s for at_s, what, _, _ in calls if what == "store ordered"][1]
    assert [at_s >= second for at_s, what, _, _ in calls if what == "killed"] == [True]


def test_an_aim_that_met_no_order_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", lambda pid, number: pytest.fail("nothing was ordered"))
    made: Any = connector()
    trace, engine = CallTrace(made, object), made()
    trace.aim = Aim(1234, "load", skip=0, delay_s=0.0)
    trace.take()
    engine.start_load_kv()
    assert [what for _, what, _, _ in trace.take()] == ["load asked", "load ordered"]


def test_loads_that_the_scheduler_hears_of_in_its_own_process_are_seen() -> None:
    class Worker:
        def take_arrived(self) -> tuple[object, ...]:
            return (SimpleNamespace(request_id="a", duration_s=0.5),)

    made: Any = connector()
    trace = CallTrace(made, Worker)
    made().start_load_kv()
    Worker().take_arrived()
    seen = transfers(trace.take())
    assert under_way(seen, "load", time.perf_counter()) == 0
    assert [one.ended_s < float("inf") for one in seen] == [True]


def a_step(tokens: list[int], blocks: list[int], computed: int) -> Any:
    """A new request, so many of whose tokens were not to be computed."""
    new = SimpleNamespace(req_id="r", prompt_token_ids=tokens, block_ids=[blocks], num_computed_tokens=computed)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=(), num_computed_tokens=[])
    return SimpleNamespace(finished_req_ids=(), scheduled_new_reqs=[new], scheduled_cached_reqs=cached)


def a_later_step(computed: int) -> Any:
    cached = SimpleNamespace(req_ids=["r"], new_block_ids=[None], resumed_req_ids=(), num_computed_tokens=[computed])
    return SimpleNamespace(finished_req_ids=(), scheduled_new_reqs=[], scheduled_cached_reqs=cached)


def test_ranks_of_other_degrees_are_compared_head_by_head(tmp_path: Path) -> None:
    """What one rank has computed, ranks with half of its heads or of its layers have in other blocks."""
    tokens = list(range(32))
    memory = torch.arange(2 * 3 * 4 * 16 * 8).view(2, 3, 4, 16, 8).to(torch.int16)  # layers, blocks, heads, tokens
    whole = HeadWatch(SimpleNamespace(kv_caches=list(memory)), 16, None, first_layer=0, first_head=0)
    whole.handle_preemptions(a_step(tokens, [2, 0], 0))
    whole.handle_preemptions(a_later_step(32))
    assert whole.counts["computed"] == 2 * 2 * 4
    whole.save(tmp_path / "whole.json")
    parts = [
        ([layer[:, 2:] for layer in memory], 0, 2),
        ([layer[:, :2] for layer in memory], 0, 0),
        (list(memory[1:]), 1, 0),
    ]
    for caches, layer, head in parts:
        swapped = [cache[[1, 0, 2]].clone() for cache in caches]  # in other blocks
        watch = HeadWatch(SimpleNamespace(kv_caches=swapped), 16, tmp_path, first_layer=layer, first_head=head)
        watch.handle_preemptions(a_step(tokens, [2, 1], 32))
        expected = 2 * len(caches) * caches[0].shape[1]
        assert (watch.counts["equal"], watch.counts["unequal"], watch.counts["unknown"]) == (expected, 0, 0)
        swapped[0][2, 0, 3, 1] += 1
        watch.handle_preemptions(a_step(tokens, [2, 1], 32))
        assert watch.counts["unequal"] == 1
    late = HeadWatch(SimpleNamespace(kv_caches=list(memory)), 16, None, first_layer=0, first_head=0)
    late.handle_preemptions(a_step(tokens, [2, 0], 32))
    assert (late.counts["equal"], late.counts["unknown"]) == (0, 2 * 2 * 4)
    late.learn(tmp_path)
    late.handle_preemptions(a_step(tokens, [2, 0], 32))
    assert (late.counts["equal"], late.counts["unknown"]) == (2 * 2 * 4, 2 * 2 * 4)
    wrong = HeadWatch(SimpleNamespace(kv_caches=[memory[0][:, :2]]), 16, tmp_path, first_layer=0, first_head=2)
    wrong.handle_preemptions(a_step(tokens, [2, 0], 32))
    assert wrong.counts["unequal"] == 4
