# ruff: noqa: INP001
"""Writes the test vectors beside this file. They are a contract with other languages: values never change.

python proto/testdata/generate_vectors.py
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.core import page
from kvpool.core.chunks import EXTRA_LORA, EXTRA_SALT, ROOT_HASH, Extra, chunk_hashes, multimodal_extra, page_hashes
from kvpool.core.codecs import decode_rows, encode_rows
from kvpool.core.geometry import AttentionKind
from kvpool.core.keyspace import (
    PUBLISHED_TENANT_SECRET,
    Codec,
    Dtype,
    KeyspaceSpec,
    KvGroup,
    OpaqueLayout,
    PayloadKind,
    derive_hash_key,
    encode_keyspace,
    keyspace_id,
)

HERE = Path(__file__).parent
LLAMA_8B = (KvGroup(layers=32, kv_heads=8, head_dim=128),)
SPECS = {
    "llama 8B shape": ("default", KeyspaceSpec("llama-8b", "0123abcd", LLAMA_8B, Dtype.BF16)),
    "another tenant": ("tenant-b", KeyspaceSpec("llama-8b", "0123abcd", LLAMA_8B, Dtype.BF16)),
    "MLA": ("default", KeyspaceSpec("deepseek", "r1", (KvGroup.mla(61, 576),), Dtype.BF16, chunk_tokens=64)),
    "quantized pages, salt, names outside of ASCII": (
        "Zürich",
        KeyspaceSpec("modèle", "版本", LLAMA_8B, Dtype.FP16, Codec.INT8_GROUP8, chunk_tokens=512, salt=b"\x00salt\xff"),
    ),
    "five groups with a window, as one": (
        "default",
        KeyspaceSpec(
            "gemma", "main-layer0x5", (KvGroup(8, 8, 256, AttentionKind.SLIDING_WINDOW, 1024, pages=5),), Dtype.BF16
        ),
    ),
    "opaque": (
        "default",
        KeyspaceSpec(
            "small",
            "main",
            (KvGroup(4, 2, 64),),
            Dtype.BF16,
            chunk_tokens=128,
            payload=PayloadKind.OPAQUE,
            opaque=OpaqueLayout("vllm-cpu", "amx-v1", "x86_64-amx", 128, 65536),
        ),
    ),
}


def keyspace_vectors() -> list[dict[str, Any]]:
    vectors = []
    for name, (tenant, spec) in SPECS.items():
        encoding = encode_keyspace(tenant, spec)
        vectors.append(
            {
                "name": name,
                "tenant": tenant,
                "spec": asdict(spec) | {"salt": spec.salt.hex()},
                "encoding": encoding.hex(),
                "keyspace_id": keyspace_id(encoding).hex(),
                "hash_key": derive_hash_key(PUBLISHED_TENANT_SECRET, keyspace_id(encoding)).hex(),
            }
        )
    return vectors


def chunk_hash_vectors() -> list[dict[str, Any]]:
    hash_key = bytes(range(32))
    parent = bytes(range(100, 116))
    lora, salt = Extra(EXTRA_LORA, b"adapter-content-hash"), Extra(EXTRA_SALT, b"user 7")
    images = [multimodal_extra(b"image-b", 20, 16), multimodal_extra(b"image-a", 10, 16)]
    cases: list[tuple[str, list[int], int, bytes, list[list[Extra]] | None]] = [
        ("no full chunk", list(range(15)), 16, ROOT_HASH, None),
        ("three chunks and a rest", list(range(1000, 1053)), 16, ROOT_HASH, None),
        ("256 tokens, the default", [(i * 7919) % 128256 for i in range(512)], 256, ROOT_HASH, None),
        ("going on after a parent", list(range(32)), 16, parent, None),
        ("lowest and highest token id", [0, 0xFFFFFFFF] * 8, 16, ROOT_HASH, None),
        ("extras, given out of order", list(range(48)), 16, ROOT_HASH, [[salt, lora], [*images, lora], []]),
    ]
    return [
        {
            "name": name,
            "hash_key": hash_key.hex(),
            "parent": parent_hash.hex(),
            "chunk_tokens": chunk_tokens,
            "tokens": tokens,
            "extras": [[{"type": e.type, "data": e.data.hex()} for e in chunk] for chunk in extras] if extras else None,
            "hashes": [value.hex() for value in chunk_hashes(hash_key, tokens, chunk_tokens, parent_hash, extras)],
        }
        for name, tokens, chunk_tokens, parent_hash, extras in cases
    ]


def page_header_vectors() -> list[dict[str, Any]]:
    vectors = []
    for payload_len, codec, shard in ((1, 1, 0), (70, 2, 63), (262144, 1, 5), (262145, 4, 1), (800000, 1, 7)):
        key = page.PageKey(bytes(range(16)), bytes(range(240, 256)), shard)
        slot = bytearray(page.page_bytes(payload_len))
        slot[page.HEADER_BYTES : page.HEADER_BYTES + payload_len] = bytes(
            (31 * i + 7) % 251 for i in range(payload_len)
        )
        page.seal(slot, key, codec, payload_len)
        vectors.append(
            {
                "keyspace_id": key.keyspace.hex(),
                "chunk_hash": key.chunk_hash.hex(),
                "shard": shard,
                "codec": codec,
                "payload_bytes": payload_len,
                "page_key": key.pack().hex(),
                "header": bytes(slot[: page.HEADER_BYTES]).hex(),
            }
        )
    return vectors


def codec_vectors() -> list[dict[str, Any]]:
    """Two groups of 8 elements a row: numbers of every size, then what is not finite or too small."""
    numbers = np.array(
        [
            [0.5, -1.25, 3.0, 1e-3, 0.0, -0.0, 7.0, -6.96875, 100.0, -448.0, 15.5, 0.0625, -2.5, 1.5, 33.0, 1e-5],
            [np.nan, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -1.0, 0.25, -0.75, 2.0, -2.0, 0.5, 1.0, 0.0],
            [np.inf, -np.inf, 60000.0, 1.0, 0.0, -1.0, 2.0, -60000.0, 2e-7, -1e-7, 6e-8, 0.0, 0.0, 0.0, 0.0, 0.0],
            [1e-31, -2e-32, 0.0, 1e-33, 0.0, 0.0, 0.0, 0.0, 1e-30, -2e-31, 0.0, 1e-32, 0.0, 0.0, 0.0, 0.0],
        ],
        dtype=np.float32,
    )
    elements: dict[Dtype, np.ndarray] = {
        Dtype.BF16: (numbers.view(np.uint32) >> np.uint32(16)).astype(np.uint16),
        Dtype.FP16: numbers.astype(np.float16),
        Dtype.FP32: numbers,
    }
    vectors = []
    for codec in (Codec.INT8_GROUP8, Codec.FP8_E4M3, Codec.INT4_GROUP8):
        for dtype, values in elements.items():
            rows = values.view(np.uint8)
            data, scales = encode_rows(codec, dtype, rows)
            decoded = decode_rows(codec, dtype, data, scales)
            parts = {"rows": rows, "data": data, "scales": scales, "decoded": decoded}
            vectors.append(
                {"codec": codec.value, "dtype": dtype.value}
                | {name: [row.tobytes().hex() for row in part] for name, part in parts.items()}
            )
    return vectors


def page_hash_vectors() -> list[dict[str, Any]]:
    hashes = bytes(range(32))
    return [
        {"pages": pages, "chunk_hashes": hashes.hex(), "page_hashes": page_hashes(hashes, pages).hex()}
        for pages in (1, 2, 9)
    ]


def write(name: str, about: str, vectors: list[dict[str, Any]]) -> None:
    text = json.dumps({"about": about, "vectors": vectors}, indent=1, ensure_ascii=True)
    (HERE / name).write_text(text + "\n")


if __name__ == "__main__":
    write(
        "keyspace_vectors.json",
        "Canonical encoding of (tenant, spec), its id, and the chunk-hash key under the published tenant secret "
        f"{PUBLISHED_TENANT_SECRET.hex()}. Bytes are in hex; enums are their wire numbers.",
        keyspace_vectors(),
    )
    write(
        "chunk_hash_vectors.json",
        "Hashes of the full chunks of tokens. Bytes are in hex; extras has an unsorted list of records per full chunk.",
        chunk_hash_vectors(),
    )
    write(
        "page_hash_vectors.json",
        "Hashes of the pages of two chunks, one chunk's after the other's. Bytes are in hex.",
        page_hash_vectors(),
    )
    write(
        "page_header_vectors.json",
        "Pages whose payload byte i is (31 * i + 7) % 251. Bytes are in hex.",
        page_header_vectors(),
    )
    write(
        "codec_vectors.json",
        "Rows of 16 elements, what a codec stores for them, and what that decodes to. Bytes are in hex, one string a "
        "row; codec and dtype are wire numbers.",
        codec_vectors(),
    )
