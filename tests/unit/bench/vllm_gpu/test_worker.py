"""What bench.vllm_gpu does inside a worker, without one."""

import os
import signal
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from bench.vllm_gpu.faults import transfers, under_way
from bench.vllm_gpu.worker import Aim, CallTrace, store_burst
from kvpool.connectors.vllm.orders import StepOrders, StoreEnd, StoreOrder


@dataclass
class Side:
    """A connector's worker that stores at once."""

    orders: list[StoreOrder] = field(default_factory=list)
    failed_chunks: int = 0
    _settings: Any = field(default_factory=lambda: SimpleNamespace(chunk_tokens=128))

    def start_stores(self, orders: StepOrders) -> None:
        self.orders += orders.stores

    def take_ends(self) -> tuple[StoreEnd, ...]:
        if not self.orders:
            return ()
        return tuple(
            StoreEnd(
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
            load, store = SimpleNamespace(request_id="a"), SimpleNamespace(number=7, first_chunk=0, end_chunk=2)
            self._connector_metadata = SimpleNamespace(orders=SimpleNamespace(loads=[load], stores=[store]))

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
