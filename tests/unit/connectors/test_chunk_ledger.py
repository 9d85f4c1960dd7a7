"""The ledger of an engine's own chunks, against a naive model."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.connectors.chunk_ledger import ChunkLedger

BLOCKS = 4
CHAINS = [[b"a0", b"a1", b"a2"], [b"a0", b"b1"], [b"c0", b"c1", b"c2", b"c3", b"c4"]]


class LedgerMachine(RuleBasedStateMachine):
    """Takes, binds, pins at will; a block must never be handed out while somebody may touch it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ChunkLedger(BLOCKS)
        self.block_of: dict[bytes, int] = {}
        self.taken: list[int] = []
        self.pins: list[int] = []

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        blocks = self.ledger.take(count)
        assert len(blocks) <= count
        assert not set(blocks) & (set(self.taken) | set(self.pins)), "a block in use was handed out"
        evictable = [block for block in self.block_of.values() if block not in self.pins]
        free = set(range(BLOCKS)) - set(self.block_of.values()) - set(self.taken) - set(self.pins)
        assert len(blocks) == min(count, len(free) + len(evictable))
        self.block_of = {key: block for key, block in self.block_of.items() if block not in blocks}
        self.taken += blocks

    @rule(chunk_hash=st.sampled_from([chunk_hash for chain in CHAINS for chunk_hash in chain]))
    def bind(self, chunk_hash: bytes) -> None:
        if self.taken:
            block = self.taken.pop()
            known = self.block_of.get(chunk_hash)
            chunk = self.ledger.bind(chunk_hash, block, pooled=False)
            assert chunk.block == (block if known is None else known)
            self.block_of[chunk_hash] = chunk.block

    @rule()
    def give_back(self) -> None:
        if self.taken:
            self.ledger.give_back([self.taken.pop()])

    @rule(block=st.integers(0, BLOCKS - 1))
    def pin(self, block: int) -> None:
        if block in self.taken or block in self.block_of.values():
            self.ledger.pin([block])
            self.pins.append(block)

    @rule(number=st.integers(0, 20))
    def unpin(self, number: int) -> None:
        if self.pins:
            block = self.pins.pop(number % len(self.pins))
            self.ledger.unpin([block])

    @rule(chain=st.sampled_from(CHAINS))
    def find(self, chain: list[bytes]) -> None:
        held = [chunk_hash in self.block_of for chunk_hash in chain]
        longest = held.index(False) if False in held else len(held)
        found = self.ledger.find(chain)
        assert [(chunk.chunk_hash, chunk.block) for chunk in found] == [
            (chunk_hash, self.block_of[chunk_hash]) for chunk_hash in chain[:longest]
        ]

    @invariant()
    def agrees(self) -> None:
        assert self.ledger.held_count == len(self.block_of)
        assert self.ledger.pinned_count == len(set(self.pins))


TestChunkLedger = LedgerMachine.TestCase


def filled(chain: list[bytes], block_count: int) -> ChunkLedger:
    ledger = ChunkLedger(block_count)
    for chunk_hash, block in zip(chain, ledger.take(len(chain)), strict=True):
        ledger.bind(chunk_hash, block, pooled=False)
    return ledger


def test_the_end_of_a_chain_goes_first() -> None:
    ledger = filled([b"a0", b"a1", b"a2"], 3)
    ledger.find([b"a0", b"a1", b"a2"])
    ledger.take(1)
    assert [chunk.chunk_hash for chunk in ledger.find([b"a0", b"a1", b"a2"])] == [b"a0", b"a1"]


def test_the_least_recently_used_chain_goes_first() -> None:
    ledger = filled([b"a0", b"b0"], 2)
    ledger.find([b"a0"])
    ledger.take(1)
    assert ledger.find([b"a0"])
    assert not ledger.find([b"b0"])


def test_a_block_that_was_given_back_while_pinned_is_free_after_its_last_pin() -> None:
    ledger = ChunkLedger(1)
    (block,) = ledger.take(1)
    ledger.pin([block])
    ledger.pin([block])
    ledger.give_back([block])
    ledger.unpin([block])
    assert ledger.take(1) == []
    ledger.unpin([block])
    assert ledger.take(1) == [block]


def test_a_pin_that_was_never_set_cannot_be_dropped() -> None:
    ledger = ChunkLedger(1)
    with pytest.raises(ValueError, match="not pinned"):
        ledger.unpin([0])


def test_a_ledger_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="block_count"):
        ChunkLedger(0)
