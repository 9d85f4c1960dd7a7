import struct
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from kvpool.core import page
from kvpool.core.errors import InvalidRequest
from kvpool.core.page import PageFault, PageKey
from tests.unit.core.vectors import load_vectors

KEY = PageKey(bytes(range(16)), bytes(range(16, 32)), 63)


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
    fields = b"KVPG\x03" + bytes([codec]) + packed_key + payload_len.to_bytes(8, "little")
    header = fields + xxh3_128_digest(fields + payload)
    assert (packed_key.hex(), header.hex()) == (vector["page_key"], vector["header"])

    key = PageKey(bytes.fromhex(keyspace), bytes.fromhex(chunk_hash), shard)
    assert key.pack() == packed_key
    assert sealed(payload_len, key, codec) == header + payload
    assert page.verify(header + payload, key, codec, payload_len) is None


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
    "at, fault",
    [
        (0, PageFault.WRONG_MAGIC),
        (4, PageFault.WRONG_VERSION),
        (5, PageFault.WRONG_CODEC),
        (6, PageFault.WRONG_KEY),
        (39, PageFault.WRONG_KEY),
        (40, PageFault.WRONG_LENGTH),
        (47, PageFault.WRONG_LENGTH),
        (48, PageFault.BAD_DIGEST),
        (63, PageFault.BAD_DIGEST),
        (64, PageFault.BAD_DIGEST),
        (64 + 69, PageFault.BAD_DIGEST),
    ],
)
def test_a_fault_says_what_is_wrong(at: int, fault: PageFault) -> None:
    slot = sealed(70)
    slot[at] ^= 0x10
    assert page.verify(slot, KEY, 1, 70) is page.verify(bytes(slot), KEY, 1, 70) is fault


def test_a_good_page_of_another_key_codec_or_length_is_refused() -> None:
    slot = sealed(70)
    assert page.verify(slot, PageKey(KEY.keyspace, KEY.chunk_hash, 0)) == PageFault.WRONG_KEY
    assert page.verify(slot, KEY, codec=2) == PageFault.WRONG_CODEC
    assert page.verify(slot, KEY, payload_len=71) == PageFault.WRONG_LENGTH
    for cut in (0, 63, 64, len(slot) - 1):
        assert page.verify(slot[:cut], KEY) == PageFault.WRONG_LENGTH


@given(st.data())
def test_a_flip_in_a_large_payload_is_caught(data: st.DataObject) -> None:
    payload_len = 600_005
    slot = sealed(payload_len)
    slot[64 + data.draw(st.integers(0, payload_len - 1))] ^= data.draw(st.sampled_from([1, 128]))
    assert page.verify(slot, KEY) is PageFault.BAD_DIGEST


def test_sizes() -> None:
    assert page.page_bytes(0) == 64
    assert page.page_bytes(2 << 20) == 64 + (2 << 20)
    assert page.slot_bytes(4096 - 64) == 4096
    assert page.slot_bytes(4096 - 63) == 8192


def test_any_buffer_will_do_and_nothing_is_copied() -> None:
    words: Any = np.zeros(64, dtype=np.uint64)
    slots: list[Any] = [np.zeros(512, dtype=np.uint8), memoryview(bytearray(512)), memoryview(words)]
    for slot in slots:
        page.payload_view(slot, 300)[0] = 7
        page.seal(slot, KEY, 1, 300)
        assert page.verify(slot, KEY, 1, 300) is None
        assert bytes(memoryview(slot).cast("B"))[64] == 7


def test_a_page_of_a_newer_codec_can_be_verified() -> None:
    assert page.verify(sealed(70, codec=200), KEY) is None
    assert page.verify(sealed(70, codec=200), KEY, codec=1) is PageFault.WRONG_CODEC


def test_a_length_that_claims_the_address_space_is_no_crash() -> None:
    slot = sealed(70)
    for claimed in (2**64 - 1, 2**63, 71):
        struct.pack_into("<Q", slot, 40, claimed)
        assert page.verify(slot, KEY) == PageFault.WRONG_LENGTH


def test_a_buffer_that_is_too_short_is_refused() -> None:
    for call in (
        lambda: page.seal(bytearray(100), KEY, 1, 70),
        lambda: page.payload_view(bytearray(100), 70),
        lambda: page.seal(bytearray(100), KEY, 1, -1),
    ):
        with pytest.raises(InvalidRequest, match=r"of 70|of -1"):
            call()


def test_faults_and_keys_read_well() -> None:
    assert str(PageFault.WRONG_KEY) == "wrong key"
    assert str(KEY) == f"{bytes(range(16)).hex()}/{bytes(range(16, 32)).hex()}/63"
