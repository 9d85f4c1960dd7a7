from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.chunks import (
    EXTRA_LORA,
    EXTRA_SALT,
    GROUP_CHUNKS,
    ROOT_HASH,
    Extra,
    chunk_hashes,
    chunk_runs,
    group_head_index,
    multimodal_extra,
    page_hashes,
)
from kvpool.core.errors import InvalidRequest
from tests.unit.core.vectors import load_vectors

KEY = bytes(range(32))
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=100)
extra_records = st.builds(Extra, st.sampled_from([1, 2, 3]), st.binary(min_size=1, max_size=20))


def hashes_by_hand(
    key: bytes, tokens: list[int], chunk_tokens: int, parent: bytes, extras: list[list[tuple[int, bytes]]] | None
) -> list[bytes]:
    """The definition, letter by letter."""
    hashes = []
    for index in range(len(tokens) // chunk_tokens):
        hasher = blake3(key=key)
        hasher.update(parent)
        for token in tokens[index * chunk_tokens : (index + 1) * chunk_tokens]:
            hasher.update(token.to_bytes(4, "little"))
        for kind, data in sorted(extras[index]) if extras else []:
            hasher.update(bytes([kind]) + len(data).to_bytes(4, "little") + data)
        parent = hasher.digest()[:16]
        hashes.append(parent)
    return hashes


@pytest.mark.parametrize("vector", load_vectors("page_hash_vectors.json"), ids=lambda vector: str(vector["pages"]))
def test_hashes_of_pages(vector: dict[str, Any]) -> None:
    chunks = [bytes.fromhex(vector["chunk_hashes"])[at : at + 16] for at in (0, 16)]
    by_hand = [
        bytes([one[0] ^ page]) + one[1:-1] + bytes([one[-1] ^ page])
        for one in chunks
        for page in range(vector["pages"])
    ]
    assert page_hashes(b"".join(chunks), vector["pages"]).hex() == vector["page_hashes"] == b"".join(by_hand).hex()


@given(st.lists(st.integers(1, 9), max_size=8), st.integers(1, 5))
def test_runs_of_chunks_are_those_of_their_pages(counts: list[int], pages: int) -> None:
    runs = list(enumerate(counts))
    owners = [number for number, count in runs for _ in range(count)]
    far = {number: number * 7 % 3 for number, _ in runs}
    expected = []
    for first in range(0, len(owners) - pages + 1, pages):
        of_chunk = owners[first : first + pages]
        farthest = max(far[number] for number in of_chunk)
        expected.append(max(number for number in of_chunk if far[number] == farthest))
    found = chunk_runs(
        [(count, number) for number, count in runs],
        pages,
        lambda one, later: one if far[one] > far[later] else later,
    )
    assert [number for count, number in found for _ in range(count)] == expected


@pytest.mark.parametrize("vector", load_vectors("chunk_hash_vectors.json"), ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    key, parent = bytes.fromhex(vector["hash_key"]), bytes.fromhex(vector["parent"])
    tokens, chunk_tokens, records = vector["tokens"], vector["chunk_tokens"], vector["extras"]
    pairs = records and [[(record["type"], bytes.fromhex(record["data"])) for record in chunk] for chunk in records]
    extras = pairs and [[Extra(*pair) for pair in chunk] for chunk in pairs]
    expected = [bytes.fromhex(value) for value in vector["hashes"]]
    assert chunk_hashes(key, tokens, chunk_tokens, parent, extras) == expected
    assert hashes_by_hand(key, tokens, chunk_tokens, parent, pairs) == expected


@given(token_lists, st.sampled_from([1, 3, 16]), st.binary(min_size=16, max_size=16), st.data())
def test_any_input_form_gives_the_defined_hashes(
    tokens: list[int], chunk_tokens: int, parent: bytes, data: st.DataObject
) -> None:
    count = len(tokens) // chunk_tokens
    extras = data.draw(st.none() | st.lists(st.lists(extra_records, max_size=3), min_size=count, max_size=count))
    pairs = [[(extra.type, extra.data) for extra in chunk] for chunk in extras] if extras is not None else None
    expected = hashes_by_hand(KEY, tokens, chunk_tokens, parent, pairs)
    strided = np.repeat(np.array(tokens, dtype=np.int64), 2)[::2]
    for form in (tokens, tuple(tokens), np.array(tokens, dtype=np.uint32), strided, strided.astype(">i8")):
        assert chunk_hashes(KEY, form, chunk_tokens, parent, extras) == expected


@given(token_lists.filter(lambda tokens: len(tokens) >= 4), st.data())
def test_a_changed_token_changes_its_hash_and_all_after_it(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) // 4 * 4 - 1))
    changed = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    for index, (ours, theirs) in enumerate(
        zip(chunk_hashes(KEY, tokens, 4), chunk_hashes(KEY, changed, 4), strict=True)
    ):
        assert (ours == theirs) == (index < at // 4)


def test_a_chain_can_be_continued_from_its_parent() -> None:
    whole = chunk_hashes(KEY, range(96), 16)
    assert chunk_hashes(KEY, range(48, 96), 16, parent=whole[2]) == whole[3:]
    assert chunk_hashes(bytes(32), range(96), 16)[0] != whole[0]


def test_extras_are_sorted_and_count() -> None:
    lora, salt = Extra(EXTRA_LORA, b"x"), Extra(EXTRA_SALT, b"y")
    ordered, reversed_, without = (
        chunk_hashes(KEY, range(16), 16, extras=[e]) for e in ([lora, salt], [salt, lora], [])
    )
    assert ordered == reversed_ != without
    assert without == chunk_hashes(KEY, range(16), 16)


def test_two_images_in_exchanged_order_do_not_hash_alike() -> None:
    one_way = [multimodal_extra(b"a", 16, 16), multimodal_extra(b"b", 20, 16)]
    other_way = [multimodal_extra(b"b", 16, 16), multimodal_extra(b"a", 20, 16)]
    assert chunk_hashes(KEY, [7] * 16, 16, extras=[one_way]) != chunk_hashes(KEY, [7] * 16, 16, extras=[other_way])


@pytest.mark.parametrize(
    "tokens",
    [
        [-1] * 16,
        [2**32] * 16,
        [2**70] * 16,
        [0.5] * 16,
        [[1, 2]] * 16,
        [[1], [1, 2]],
        np.array([-1], dtype=np.int8),
        "ab",
    ],
)
def test_bad_tokens_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidRequest, match="tokens must"):
        chunk_hashes(KEY, tokens, 16)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hash_key": b"x"}, "hash_key"),
        ({"parent": b"x"}, "parent"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"extras": [[]]}, "extras must have one entry for each of the 2"),
    ],
)
def test_bad_arguments_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {"hash_key": KEY, "tokens": range(32), "chunk_tokens": 16, "parent": ROOT_HASH}
    with pytest.raises(InvalidRequest, match=words):
        chunk_hashes(**(arguments | changes))


@pytest.mark.parametrize("kind, data", [(0, b"x"), (4, b"x"), (EXTRA_LORA, b"")])
def test_bad_extras_are_refused(kind: int, data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="extra"):
        Extra(kind, data)


def test_chain_groups_begin_every_16_chunks() -> None:
    assert [group_head_index(index) for index in (0, 15, 16, 31, 32)] == [0, 0, 16, 16, 32]
    assert GROUP_CHUNKS == 16
