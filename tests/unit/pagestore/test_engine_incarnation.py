"""Incarnations that a pagestore adopts: its own while the index has not answered, and what the index grants later."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvpool.testing import eventually
from tests.fixtures.pagestore import new_world, running_engine
from tests.fixtures.patience import PATIENCE_S


async def test_what_the_index_grants_late_is_served_however_slow_the_disk_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with new_world() as world:
        save_value, saved, go = world.memory.save_value, list[bytes](), threading.Event()

        def slow(name: str, value: bytes) -> None:
            saved.append(value)
            if len(saved) == 1:
                assert go.wait(PATIENCE_S)
            save_value(name, value)

        async with running_engine(world) as running:
            engine = running.engine
            monkeypatch.setattr(world.memory, "save_value", slow)
            own = asyncio.ensure_future(engine.adopt_incarnation(7_000))
            await eventually(lambda: saved)
            granted = asyncio.ensure_future(engine.adopt_incarnation(6_000))  # its clock is behind this node's
            try:
                with pytest.raises(AssertionError):
                    await eventually(lambda: len(saved) == 2, deadline_s=0.1)
            finally:
                go.set()
            await asyncio.gather(own, granted)
            assert engine.incarnation == 6_000
            assert saved[-1] == (6_000).to_bytes(8, "little")
