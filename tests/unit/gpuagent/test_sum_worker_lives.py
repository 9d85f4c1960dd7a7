"""Sum workers that are killed, replaced and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvpool.core.page import HEADER_BYTES, verify
from kvpool_gpuagent.adapters.page_sums import ThreadSums
from kvpool_gpuagent.adapters.sum_process import Channel
from kvpool_gpuagent.adapters.sum_workers import SumWorkers
from tests.unit.gpuagent.sum_pages import BLOCK, CODEC, SIZES, WAIT_S, Segment, no_fallback, until, workers


def test_workers_killed_while_they_are_asked_cost_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    ask = Channel.ask

    def noted(channel: Channel, request: bytes) -> None:
        ask(channel, request)
        asked.append(request)

    monkeypatch.setattr(Channel, "ask", noted)
    with workers(restart_s=60) as sums, closing(Segment()) as one:
        sums.register(one.mapped())
        sums.seal_all(one.pages)
        one.pages[7].page[HEADER_BYTES + 5 * BLOCK] ^= 1
        expected = [verify(page.page, page.key, CODEC) for page in one.pages]
        pids = list(sums.pids)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # asked, it will not answer
        asked.clear()
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(sums.verify_all, one.pages)
            until(lambda: len(asked) == len(pids))
            assert not answer.done()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert answer.result(WAIT_S) == expected
        until(lambda: not sums.pids)
        assert not sums.is_fast
        assert sums.verify_all(one.pages) == expected  # without any
        sums.seal_all(one.pages)
        assert sums.verify_all(one.pages) == [None] * len(SIZES)


def test_a_lost_worker_is_replaced_and_knows_the_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    with workers() as sums, closing(Segment()) as one:
        undo = sums.register(one.mapped())
        before = set(sums.pids)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(set(sums.pids) - before) == 2)
        assert sums.is_fast
        with monkeypatch.context() as patch:
            no_fallback(patch)
            sums.seal_all(one.pages)
        undo()
        assert all(not Path(f"/proc/{pid}").exists() for pid in before)  # not even a zombie


def test_close_leaves_no_process_and_no_descriptor() -> None:
    with closing(Segment()) as one:
        before = set(os.listdir("/proc/self/fd"))
        with workers() as sums:
            undo = sums.register(one.mapped())
            sums.seal_all(one.pages)
            pids = list(sums.pids)
            sums.close()
            assert all(not Path(f"/proc/{pid}").exists() for pid in pids)
            assert not sums.is_fast
            undo()
        assert set(os.listdir("/proc/self/fd")) == before


def test_workers_end_with_a_parent_that_is_killed() -> None:
    program = (
        "import sys, time\n"
        "from kvpool_gpuagent.adapters.page_sums import ThreadSums\n"
        "from kvpool_gpuagent.adapters.sum_workers import SumWorkers\n"
        "sums = SumWorkers(2, ThreadSums(1))\n"
        "while len(sums.pids) < 2: time.sleep(0.01)\n"
        "print(*sums.pids, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        os.kill(pids[0], signal.SIGSTOP)  # cannot see its socket close
        parent.kill()
    assert len(pids) == 2
    until(lambda: all(_has_ended(pid) for pid in pids))


def _has_ended(pid: int) -> bool:
    """Whoever inherits it may take its time to wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_sums_are_fast_only_where_workers_can_read() -> None:
    with workers() as sums, closing(Segment()) as one:
        seen = [sums.is_fast]  # as without a local pagestore
        undo = sums.register(one.mapped())
        seen.append(sums.is_fast)
        undo()
        assert [*seen, sums.is_fast] == [False, True, False]


def test_close_does_not_wait_for_workers_that_start() -> None:
    sums = SumWorkers(2, ThreadSums(1))
    sums.close()
    assert not sums.pids
