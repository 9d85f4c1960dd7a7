"""Copies out of an engine's cache while the engine reuses its blocks: whatever the order, no wrong byte counts.

The engine is the real table in shared memory, the look-up the agent's real ledger. A copy reads block by block; between
any two of its steps the engine may do any of its own: raise generations, write, announce. The model knows what each
block holds.
"""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.client.block_generations import BlockGenerations
from kvpool_gpuagent.core.cached_chunks import CachedChunks, FoundChunks
from kvpool_gpuagent.engine.descriptors import map_generations
from tests.fixtures.layout_presets import vllm_nhd_layout
from tests.host_gpu.test_cached_prefixes import SPEC

BLOCKS, WIDTH, CHUNKS = 8, 2, 6

chunk_numbers = st.integers(0, CHUNKS - 1)
block_numbers = st.permutations(range(BLOCKS)).map(lambda order: order[:WIDTH])


def name(chunk: int) -> bytes:
    return bytes([chunk]) * 16


class Copies(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.engine = BlockGenerations(vllm_nhd_layout(SPEC, range(2), range(2), 8, BLOCKS))
        mapped = map_generations(self.engine.region.lent_descriptor(), BLOCKS)
        self.agent = CachedChunks(np.frombuffer(mapped, dtype=np.int64), WIDTH)
        self.memory: list[object] = [None] * BLOCKS  # (chunk, part) or a number for anything else
        self.junk = itertools.count()
        self.step: list[tuple[int, object]] = []  # writes that were launched and have not happened
        self.to_announce: list[tuple[int, list[int]]] = []  # computed in the step before
        self.announcements: list[tuple[bytes, np.ndarray, np.ndarray]] = []  # on their way
        self.copy: FoundChunks | None = None
        self.copied: list[object] = []

    def launch(self, writes: list[tuple[int, object]]) -> None:
        """One engine step, as the connector's worker does it: generations to announce, raise, launch."""
        self.finish_step()
        for chunk, blocks in self.to_announce:
            ids = np.array(blocks)
            self.announcements.append((name(chunk), ids, self.engine.of(ids)))
        self.to_announce = []
        self.engine.raise_blocks([block for block, _ in writes])
        self.step = list(writes)

    def finish_step(self) -> None:
        for block, content in self.step:
            self.memory[block] = content
        self.step = []

    @rule(chunk=chunk_numbers, blocks=block_numbers)
    def compute(self, chunk: int, blocks: list[int]) -> None:
        self.launch([(block, (chunk, part)) for part, block in enumerate(blocks)])
        self.to_announce = [(chunk, blocks)]

    @rule(blocks=st.lists(st.integers(0, BLOCKS - 1), max_size=3))
    def reuse(self, blocks: list[int]) -> None:
        self.launch([(block, next(self.junk)) for block in blocks])

    @rule()
    def lose_a_step(self) -> None:
        """Its orders are not known: it may write anywhere."""
        self.finish_step()
        self.to_announce = []
        self.engine.raise_all()
        self.step = [(block, next(self.junk)) for block in range(BLOCKS)]

    @precondition(lambda self: self.step)
    @rule()
    def write_one_block(self) -> None:
        block, content = self.step.pop(0)
        self.memory[block] = content

    @precondition(lambda self: self.announcements)
    @rule()
    def announcement_comes(self) -> None:
        self.agent.announce(*self.announcements.pop(0))

    @rule(chunks=st.lists(chunk_numbers, min_size=1, max_size=3, unique=True))
    def begin_copy(self, chunks: list[int]) -> None:
        self.asked = chunks
        self.copy, self.copied = self.agent.find([name(chunk) for chunk in chunks]), []

    @precondition(lambda self: self.copy is not None and len(self.copied) < self.copy.block_ids.size)
    @rule()
    def copy_one_block(self) -> None:
        assert self.copy is not None
        self.copied.append(self.memory[int(self.copy.block_ids.reshape(-1)[len(self.copied)])])

    @precondition(lambda self: self.copy is not None and len(self.copied) == self.copy.block_ids.size)
    @rule()
    def end_copy(self) -> None:
        assert self.copy is not None
        now = self.agent.generations(self.copy.block_ids)
        for row, position in enumerate(self.copy.positions.tolist()):
            if (now[row] == self.copy.generations[row]).all():
                expected = [(self.asked[position], part) for part in range(WIDTH)]
                assert self.copied[row * WIDTH : (row + 1) * WIDTH] == expected
        self.copy = None

    @invariant()
    def entries_are_bounded(self) -> None:
        assert len(self.agent) <= BLOCKS

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()


TestCopies = Copies.TestCase
