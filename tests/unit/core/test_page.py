import struct
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from kvpool.core import page
from kvpool.core.errors import InvalidRequest
from kvpool.core.page import PageFault, PageFaultKind, PageHeader, PageKey
from tests.unit.core.vectors import load_vectors

KEY = PageKey(bytes(range(16)), bytes(range(16, 32)), 63)
BLOCK = page.SUM_BLOCK_BYTES


@cache
def pattern(payload_len: int) -> bytes:
    return bytes((31 * i + 7) % 251 for i in range(payload_len))


def sealed(payload_len: int, key: PageKey = KEY, codec: int = 1, spare: int = 0) -> bytearray:
    slot = bytearray(page.page_bytes(payload_len) + spare)
    slot[64 : 64 + payload_len] = pattern(payload_len)
    page.seal(slot, key, codec, payload_len)
    return slot


@pytest.mark.parametrize("vector", load_vectors("page_header_vectors.json"), ids=lambda v: str(v["payload_bytes"]))
def test_vectors(vector: dict[str, Any]) -> None:
    payload_len, codec = vector["payload_bytes"], vector["codec"]
    keyspace, chunk_hash, shard = vector["keyspace_id"], vector["chunk_hash"], vector["shard"]
    payload = pattern(payload_len)
    packed_key = bytes.fromhex(keyspace) + bytes.fromhex(chunk_hash) + shard.to_bytes(2, "little")
    blocks = [payload[at : at + 262144] for at in range(0, payload_len, 262144)]
    sums = b"".join(xxh3_64_intdigest(block).to_bytes(8, "little") for block in blocks)
    fields = b"KVPG\x02" + bytes([codec]) + packed_key + payload_len.to_bytes(8, "little")
    header = fields + xxh3_128_digest(fields + sums)
    assert (packed_key.hex(), sums.hex(), header.hex()) == (vector["page_key"], vector["sum_table"], vector["header"])

    key = PageKey(bytes.fromhex(keyspace), bytes.fromhex(chunk_hash), shard)
    assert key.pack() == packed_key
    assert sealed(payload_len, key, codec) == header + payload + sums
    assert page.pack_header(key, codec, payload_len, sums) == header
    assert page.verify(header + payload + sums, key, codec, payload_len) is None


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), st.integers(0, 65535))
def test_keys_pack_and_unpack(keyspace: bytes, chunk_hash: bytes, shard: int) -> None:
    key = PageKey(keyspace, chunk_hash, shard)
    assert len(key.pack()) == 34
    assert PageKey.unpack(key.pack()) == PageKey.unpack(memoryview(key.pack())) == key


def test_malformed_keys_are_refused() -> None:
    for keyspace_bytes, hash_bytes, shard in ((5, 16, 0), (16, 17, 0), (16, 16, -1), (16, 16, 65536)):
        with pytest.raises(InvalidRequest, match="page key"):
            PageKey(bytes(keyspace_bytes), bytes(hash_bytes), shard)
    with pytest.raises(InvalidRequest, match="page key must have 34 bytes, got 33"):
        PageKey.unpack(bytes(33))


@pytest.mark.parametrize("payload_len", [1, 70])
def test_every_flipped_bit_is_caught(payload_len: int) -> None:
    slot = sealed(payload_len)
    assert page.verify(slot, KEY) is None
    for bit in range(8 * len(slot)):
        slot[bit // 8] ^= 1 << bit % 8
        assert page.verify(slot, KEY) is not None, f"bit {bit}"
        slot[bit // 8] ^= 1 << bit % 8
    assert page.verify(slot, KEY) is None


@pytest.mark.parametrize(
    "at, kind",
    [
        (0, PageFaultKind.WRONG_MAGIC),
        (4, PageFaultKind.WRONG_VERSION),
        (5, PageFaultKind.WRONG_CODEC),
        (6, PageFaultKind.WRONG_KEY),
        (39, PageFaultKind.WRONG_KEY),
        (40, PageFaultKind.WRONG_LENGTH),
        (47, PageFaultKind.WRONG_LENGTH),
        (48, PageFaultKind.BAD_DIGEST),
        (64 + 70, PageFaultKind.BAD_DIGEST),
        (64, PageFaultKind.BAD_SUM),
    ],
)
def test_a_fault_says_what_is_wrong(at: int, kind: PageFaultKind) -> None:
    slot = sealed(70)
    slot[at] ^= 0x10
    fault = page.verify(slot, KEY, 1, 70)
    assert fault is not None and fault.kind is kind
    assert page.verify(bytes(slot), KEY, 1, 70) == fault


def test_a_good_page_of_another_key_codec_or_length_is_refused() -> None:
    slot = sealed(70)
    assert page.verify(slot, PageKey(KEY.keyspace, KEY.chunk_hash, 0)) == PageFault(PageFaultKind.WRONG_KEY)
    assert page.verify(slot, KEY, codec=2) == PageFault(PageFaultKind.WRONG_CODEC)
    assert page.verify(slot, KEY, payload_len=71) == PageFault(PageFaultKind.WRONG_LENGTH)
    for cut in (0, 63, 64, len(slot) - 1):
        assert page.verify(slot[:cut], KEY) == PageFault(PageFaultKind.WRONG_LENGTH)


@given(st.data())
def test_a_flip_in_a_large_payload_names_its_block(data: st.DataObject) -> None:
    payload_len = 2 * BLOCK + 5
    slot = sealed(payload_len)
    at = data.draw(st.integers(0, payload_len - 1))
    slot[64 + at] ^= data.draw(st.sampled_from([1, 128]))
    assert page.verify_header(slot, KEY) is None
    assert page.verify(slot, KEY) == PageFault(PageFaultKind.BAD_SUM, at // BLOCK)
    for block in range(3):
        fault = page.verify_blocks(slot, payload_len, range(block, block + 1))
        assert (fault is not None) == (block == at // BLOCK)


@given(st.sampled_from([1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK]), st.integers(1, 5))
def test_a_page_may_be_sealed_range_by_range(payload_len: int, step: int) -> None:
    whole, piecewise = sealed(payload_len, spare=100), sealed(payload_len, spare=100)
    piecewise[:64] = bytes(64)
    piecewise[64 + payload_len : -100] = bytes(8 * page.block_count(payload_len))
    for first in range(0, page.block_count(payload_len), step):
        page.write_sums(piecewise, payload_len, range(first, min(first + step, page.block_count(payload_len))))
    assert page.verify(piecewise, KEY) == PageFault(PageFaultKind.WRONG_MAGIC)  # unusable until its header is there
    page.write_header(piecewise, KEY, 1, payload_len)
    assert piecewise == whole


def test_sizes() -> None:
    assert page.page_bytes(0) == 64
    assert page.page_bytes(2 << 20) == 64 + (2 << 20) + 8 * 8
    assert page.slot_bytes(4096 - 64 - 8) == 4096
    assert page.slot_bytes(4096 - 64 - 7) == 8192


def test_any_buffer_will_do_and_nothing_is_copied() -> None:
    words: Any = np.zeros(64, dtype=np.uint64)
    slots: list[Any] = [np.zeros(512, dtype=np.uint8), memoryview(bytearray(512)), memoryview(words)]
    for slot in slots:
        page.payload_view(slot, 300)[0] = 7
        page.seal(slot, KEY, 1, 300)
        assert page.verify(slot, KEY, 1, 300) is None
        assert bytes(memoryview(slot).cast("B"))[64] == 7
    header = page.parse_header(words.view(np.uint8))
    assert isinstance(header, PageHeader) and (header.key, header.codec, header.payload_bytes) == (KEY, 1, 300)


def test_a_header_of_a_newer_codec_can_be_parsed() -> None:
    header = page.parse_header(sealed(70, codec=200))
    assert isinstance(header, PageHeader) and header.codec == 200
    assert page.parse_header(bytes(63)) == PageFault(PageFaultKind.WRONG_LENGTH)


def test_a_length_that_claims_the_address_space_is_no_crash() -> None:
    slot = sealed(70)
    for claimed in (2**64 - 1, 2**63, 71):
        struct.pack_into("<Q", slot, 40, claimed)
        assert page.verify(slot, KEY) == PageFault(PageFaultKind.WRONG_LENGTH)


def test_a_buffer_that_is_too_short_is_refused() -> None:
    for call in (
        lambda: page.seal(bytearray(100), KEY, 1, 70),
        lambda: page.write_sums(bytearray(100), 70),
        lambda: page.payload_view(bytearray(100), 70),
        lambda: page.verify_blocks(bytearray(100), 70),
        lambda: page.write_sums(sealed(70), 70, range(2)),
        lambda: page.seal(bytearray(100), KEY, 1, -1),
    ):
        with pytest.raises(InvalidRequest, match=r"of 70|of -1"):
            call()


def test_faults_and_keys_read_well() -> None:
    assert str(PageFault(PageFaultKind.BAD_SUM, 3)) == "bad sum of block 3"
    assert str(PageFault(PageFaultKind.WRONG_KEY)) == "wrong key"
    assert str(KEY) == f"{bytes(range(16)).hex()}/{bytes(range(16, 32)).hex()}/63"
