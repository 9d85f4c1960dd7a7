"""Kernels that the engine launches for its agent: a whole session, on both sides, over the wire."""

from __future__ import annotations

import pytest

from kvpool.core.launches import LaunchKind
from kvpool_gpuagent.core.ways import Way
from tests.fixtures.agent import prompt, run_load, run_store
from tests.fixtures.launching_engine import launching_host

CHUNKS = 3


@pytest.mark.parametrize("contended", [False, True])
async def test_what_the_engine_gathers_and_scatters_is_what_it_computed(contended: bool) -> None:
    async with launching_host() as one:
        engine, _, launcher = one.engine()
        session = await engine.open()
        if contended:
            one.contend()
        chain = prompt(session, CHUNKS)
        engine.compute(chain, range(CHUNKS))
        assert (await run_store(session, engine.span(chain, range(CHUNKS)))).stored_chunks == CHUNKS
        engine.clear()
        outcome = await run_load(session, engine.span(chain, range(CHUNKS), at=5))
        assert outcome.loaded_chunks == CHUNKS
        assert engine.holds(chain, range(CHUNKS), at=5)
        assert {(launch.kind, launch.sums) for launch in launcher.asked} == {
            (kind, not contended) for kind in LaunchKind
        }
        assert Way.ENGINE in one.ways
        assert await session.close()
