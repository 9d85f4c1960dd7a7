"""Chunks in the order of their chains."""

from kvpool.core.chain_order import in_chain_order
from kvpool.core.chunks import ROOT_HASH


def chunk_hash(number: int) -> bytes:
    return number.to_bytes(8, "big") * 2


def test_chains_are_reported_whole_and_in_order() -> None:
    a, b, c, d, lost = (chunk_hash(number) for number in range(1, 6))
    parents = {c: b, b: a, a: ROOT_HASH, d: a, lost: b"absent" + bytes(10)}
    assert list(in_chain_order(parents)) == [a, b, c, d]
    assert list(in_chain_order({a: b, b: a})) == [], "a circle has no root"
