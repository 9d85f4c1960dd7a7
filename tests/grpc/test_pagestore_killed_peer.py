"""A peer that is killed or stopped between reserve and commit: a real child process on a real arena."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from kvpool.core.outcome import Admission
from kvpool.testing import ManualClock, eventually
from kvpool_pagestore.core.page_table import Grant
from tests.fixtures import pagestore_peer
from tests.fixtures.pagestore import SLOT_BYTES, new_world
from tests.fixtures.pagestore_calls import acquire_one, open_session, reserve_item, wanted
from tests.fixtures.pagestore_server import Served, served


@asynccontextmanager
async def doomed_peer(store: Served, *numbers: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child that has reserved the pages and waits."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(pagestore_peer.__file__)),
        store.endpoint,
        *(str(number) for number in numbers),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        assert child.stdout is not None
        assert await asyncio.wait_for(child.stdout.readline(), 60) == b"reserved\n"
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def test_a_peer_killed_between_reserve_and_commit_leaves_nothing_visible_and_its_slots_come_back() -> None:
    with new_world() as world:
        async with served(world) as store:
            running = store.running
            async with doomed_peer(store, 1, 2) as child:
                assert running.engine.gauges().arena_used_bytes == 2 * SLOT_BYTES
                child.kill()
                await child.wait()
                # Its slots may have come back by now: it is gone, and so are its mappings.
                await eventually(lambda: running.metric("ended_sessions_total", manner="abnormal") == 1)
                peer = await open_session(running)
                assert (await acquire_one(running, peer, wanted(1))).grant is None
                (answer,) = await running.engine.pages.reserve(peer, [reserve_item(1)])
                assert isinstance(answer, Grant), Admission.PENDING
                running.engine.pages.abort(peer, [answer.lease_id])
                await eventually(lambda: running.engine.gauges().arena_quarantined_bytes == 0)
                assert running.engine.gauges().arena_used_bytes == 0


async def test_a_stopped_peer_loses_its_session_but_keeps_its_slots_until_it_is_gone() -> None:
    clock = ManualClock()
    with new_world(clock=clock) as world:
        async with served(world, heartbeat_interval_ms=1000) as store:  # a peer may stand still for 4 s
            running = store.running
            look, looks = running.arena.gone_sessions, [0]

            def counted(session_ids: Sequence[bytes]) -> Sequence[bytes]:
                looks[0] += 1
                return look(session_ids)

            async def looked() -> None:
                """What a look finds is carried out before the next one begins."""
                seen = looks[0]
                await eventually(lambda: looks[0] > seen + 1)

            running.arena.gone_sessions = counted  # type: ignore[method-assign]
            async with doomed_peer(store, 1) as child:
                child.send_signal(signal.SIGSTOP)

                def is_given_up() -> bool:
                    clock.advance(0.005)  # as it passes; a jump would be a standstill of the store itself
                    return running.engine.gauges().quarantined_sessions == 1

                try:
                    await eventually(is_given_up)
                    clock.advance(1.0)  # more than the grace of a quarantine
                    await looked()
                    assert running.engine.gauges().arena_quarantined_bytes == SLOT_BYTES
                finally:
                    child.send_signal(signal.SIGCONT)
                # Alive again, it has learnt that its session is over, but still maps the slot.
                clock.advance(1.0)
                await looked()
                assert running.engine.gauges().arena_quarantined_bytes == SLOT_BYTES
                child.kill()
                await child.wait()

                def is_back() -> bool:
                    clock.advance(0.1)
                    return running.engine.gauges().arena_quarantined_bytes == 0

                await eventually(is_back)
