"""What must be equal before two engines may share bytes, its canonical encoding and what is derived from that.

The encoding is a version string followed by fields, each once and in ascending order of tag from 1: tag u8, length u32,
value (integers u32, little endian; strings in UTF-8). The opaque fields are left out unless the payload is opaque. Two
keyspaces are equal exactly if their encodings are, so the 16-byte id is a plain hash of it.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from blake3 import blake3

from kvpool.core.elements import CODEC_FORMATS, Codec, CodecFormat, Dtype, codec_from_id
from kvpool.core.errors import GeometryUnsupported, InvalidRequest
from kvpool.core.geometry import AttentionKind, KvGroup, OpaqueLayout, PayloadKind, check_count, check_name

__all__ = [
    "CODEC_FORMATS",
    "DEFAULT_CHUNK_TOKENS",
    "KEYSPACE_ID_BYTES",
    "PUBLISHED_TENANT_SECRET",
    "AttentionKind",
    "Codec",
    "CodecFormat",
    "Dtype",
    "KeyspaceSpec",
    "KvGroup",
    "OpaqueLayout",
    "PayloadKind",
    "codec_from_id",
    "decode_keyspace",
    "derive_hash_key",
    "differing_fields",
    "encode_keyspace",
    "keyspace_id",
    "secret_from_file_content",
]

DEFAULT_CHUNK_TOKENS = 256
KEYSPACE_ID_BYTES = 16
MAX_SALT_BYTES = 64
TENANT_SECRET_BYTES = 32
PUBLISHED_TENANT_SECRET = b"kvpool: no tenant secret is set."
"""32 bytes. Stands in for a tenant secret where there is no authentication; it protects nothing."""

_ENCODING_MAGIC = b"kvpool keyspace encoding 1\0"
_HASH_KEY_MAGIC = b"kvpool chunk hash key 1\0"
_HEAD = struct.Struct("<BI")
_U32 = struct.Struct("<I")
_GROUP = struct.Struct("<6I")


@dataclass(frozen=True, slots=True)
class KeyspaceSpec:
    """Everything but the tenant that must be equal before bytes are shared. Never TP, PP or (unless opaque) block size.

    raises: InvalidRequest naming the field; GeometryUnsupported naming what is not supported.
    """

    model_id: str
    model_revision: str
    groups: tuple[KvGroup, ...]
    dtype: Dtype
    codec: Codec = Codec.RAW
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    payload: PayloadKind = PayloadKind.CANONICAL
    opaque: OpaqueLayout | None = None
    salt: bytes = b""

    def __post_init__(self) -> None:
        check_name("model_id", self.model_id)
        check_name("model_revision", self.model_revision)
        for name, kind in (("dtype", Dtype), ("codec", Codec), ("payload", PayloadKind)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidRequest(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        check_count("chunk_tokens", self.chunk_tokens, 16, 4096)
        if self.chunk_tokens & (self.chunk_tokens - 1):
            raise InvalidRequest(f"chunk_tokens must be a power of two, got {self.chunk_tokens}")
        if len(self.salt) > MAX_SALT_BYTES:
            raise InvalidRequest(f"salt must have at most {MAX_SALT_BYTES} bytes, got {len(self.salt)}")
        _check_groups(self.groups, self.payload)
        if self.payload is PayloadKind.OPAQUE or self.opaque is not None:
            self._check_opaque()
        else:
            self._check_rows()

    def _check_opaque(self) -> None:
        if self.opaque is None or self.payload is not PayloadKind.OPAQUE:
            raise InvalidRequest("opaque must be set exactly for an OPAQUE payload")
        if self.codec is not Codec.RAW:
            raise InvalidRequest(f"codec {self.codec.name} cannot take opaque cells apart; use RAW")
        if self.chunk_tokens % self.opaque.block_tokens:
            raise InvalidRequest(
                f"chunk_tokens {self.chunk_tokens} must be a multiple of opaque.block_tokens {self.opaque.block_tokens}"
            )

    def _check_rows(self) -> None:
        elements = self.group.row_elements
        self.codec.format.check_dtype(self.dtype)
        for owner, bits in (
            ("dtype", elements * self.dtype.bits),
            ("codec", self.codec.format.data_row_bits(elements, self.dtype)),
        ):
            if bits % 8:
                raise InvalidRequest(f"{owner}: a row of {elements} elements is no whole number of bytes")
        self.codec.format.scale_row_bytes(elements, self.dtype)  # raises if the row does not fit its scale groups

    @property
    def group(self) -> KvGroup:
        """The one KV group."""
        return self.groups[0]

    @property
    def planes(self) -> int:
        """Planes of a layer in the payload: K and V; 1 for MLA and for opaque cells."""
        return 1 if self.opaque else self.group.planes

    @property
    def positions(self) -> int:
        """Rows of one chunk, plane and head: its tokens, or its blocks if the payload is opaque."""
        return self.chunk_tokens // self.opaque.block_tokens if self.opaque else self.chunk_tokens

    @property
    def engine_row_bytes(self) -> int:
        """Bytes of one row in an engine's cache of `dtype`."""
        return self.opaque.cell_bytes if self.opaque else self.group.row_elements * self.dtype.bits // 8

    @property
    def data_row_bytes(self) -> int:
        """Bytes of one row in the payload's data part."""
        if self.opaque:
            return self.opaque.cell_bytes
        return self.codec.format.data_row_bits(self.group.row_elements, self.dtype) // 8

    @property
    def scale_row_bytes(self) -> int:
        """Bytes of one row's scales in the payload's scale part; 0 without scales."""
        return 0 if self.opaque else self.codec.format.scale_row_bytes(self.group.row_elements, self.dtype)

    @property
    def scale_dtype(self) -> Dtype | None:
        """Stored type of a scale in the payload's scale part; None without scales."""
        return self.codec.format.scale_dtype(self.dtype)

    @property
    def head_bytes(self) -> int:
        """Payload bytes of one chunk for one layer and head, scales included: what the grid is made of."""
        return self.planes * self.positions * (self.data_row_bytes + self.scale_row_bytes)


def _check_groups(groups: tuple[KvGroup, ...], payload: PayloadKind) -> None:
    if not groups:
        raise InvalidRequest("groups must name the model's KV geometry, got none")
    for number, group in enumerate(groups):
        if group.attention is AttentionKind.STATE_SPACE and payload is not PayloadKind.OPAQUE:
            raise GeometryUnsupported(
                f"groups[{number}] has state space attention, whose state cannot be taken apart into tokens; set opaque"
            )
        if (group.attention in (AttentionKind.SLIDING_WINDOW, AttentionKind.GROUPED_WINDOW)) != bool(
            group.window_tokens
        ):
            raise InvalidRequest(
                f"groups[{number}].window_tokens must be set exactly for sliding windows, got {group.window_tokens} "
                f"with {group.attention.name} attention"
            )
    if len(groups) > 1:
        raise GeometryUnsupported(f"one keyspace has one KV group, got {len(groups)}; open a keyspace for each")


def encode_keyspace(tenant: str, spec: KeyspaceSpec) -> bytes:
    """Canonical bytes: equal for equal (tenant, spec), different otherwise."""
    check_name("tenant", tenant)
    groups = (
        _GROUP.pack(g.layers, g.kv_heads, g.head_dim, g.latent_dim, g.attention, g.window_tokens) for g in spec.groups
    )
    fields = [
        tenant.encode(),
        spec.model_id.encode(),
        spec.model_revision.encode(),
        b"".join(groups),
        _U32.pack(spec.dtype),
        _U32.pack(spec.codec),
        _U32.pack(spec.chunk_tokens),
        _U32.pack(spec.payload),
        spec.salt,
    ]
    if spec.opaque:
        fields += [
            spec.opaque.engine.encode(),
            spec.opaque.layout_id.encode(),
            spec.opaque.isa.encode(),
            _U32.pack(spec.opaque.block_tokens),
            _U32.pack(spec.opaque.cell_bytes),
        ]
    if any(group.pages > 1 for group in spec.groups):
        fields.append(b"".join(_U32.pack(group.pages) for group in spec.groups))
    parts = [_HEAD.pack(tag, len(value)) + value for tag, value in enumerate(fields, start=1)]
    return _ENCODING_MAGIC + b"".join(parts)


def decode_keyspace(encoding: bytes) -> tuple[str, KeyspaceSpec]:
    """The (tenant, spec) of a canonical encoding. raises: InvalidRequest or GeometryUnsupported for anything else."""
    try:
        tenant, spec = _decode(list(_fields(bytes(encoding))))
    except (ValueError, struct.error) as error:  # bad numbers, lengths or UTF-8
        raise InvalidRequest(f"keyspace encoding is malformed: {error}") from error
    if encode_keyspace(tenant, spec) != encoding:
        raise InvalidRequest("keyspace encoding is not canonical")
    return tenant, spec


def _fields(encoding: bytes) -> Iterator[bytes]:
    if not encoding.startswith(_ENCODING_MAGIC):
        raise ValueError("unknown version")
    at, tag = len(_ENCODING_MAGIC), 1
    while at < len(encoding):
        found, size_bytes = _HEAD.unpack_from(encoding, at)
        at += _HEAD.size
        if found != tag or at + size_bytes > len(encoding):
            raise ValueError(f"field {tag} is missing, misplaced or cut off")
        yield encoding[at : at + size_bytes]
        at, tag = at + size_bytes, tag + 1


def _decode(fields: list[bytes]) -> tuple[str, KeyspaceSpec]:
    if len(fields) not in (9, 10, 14, 15):
        raise ValueError(f"{len(fields)} fields")
    pages = _U32.iter_unpack(fields.pop()) if len(fields) in (10, 15) else itertools.repeat((1,))
    tenant, model_id, model_revision, groups, dtype, codec, chunk_tokens, payload, salt = fields[:9]
    return tenant.decode(), KeyspaceSpec(
        model_id=model_id.decode(),
        model_revision=model_revision.decode(),
        groups=tuple(
            KvGroup(layers, kv_heads, head_dim, AttentionKind(attention), window_tokens, latent_dim, *of_chunk)
            for (layers, kv_heads, head_dim, latent_dim, attention, window_tokens), of_chunk in zip(
                _GROUP.iter_unpack(groups), pages, strict=False
            )
        ),
        dtype=Dtype(_number(dtype)),
        codec=codec_from_id(_number(codec)),
        chunk_tokens=_number(chunk_tokens),
        payload=PayloadKind(_number(payload)),
        opaque=_decode_opaque(fields[9:]) if len(fields) > 9 else None,
        salt=salt,
    )


def _decode_opaque(fields: list[bytes]) -> OpaqueLayout:
    engine, layout_id, isa, block_tokens, cell_bytes = fields
    return OpaqueLayout(engine.decode(), layout_id.decode(), isa.decode(), _number(block_tokens), _number(cell_bytes))


def _number(value: bytes) -> int:
    number: int = _U32.unpack(value)[0]
    return number


def keyspace_id(encoding: bytes) -> bytes:
    """16 bytes: BLAKE3-128 of the canonical encoding."""
    return blake3(encoding).digest(KEYSPACE_ID_BYTES)


def differing_fields(a: KeyspaceSpec, b: KeyspaceSpec) -> tuple[str, ...]:
    """Names of the fields in which two specs differ, for example ("groups[0].kv_heads", "dtype"); empty if equal."""
    names: list[str] = []
    for name in KeyspaceSpec.__slots__:
        left, right = getattr(a, name), getattr(b, name)
        if left == right:
            continue
        if name == "groups" and len(left) == len(right):
            for number, (ours, theirs) in enumerate(zip(left, right, strict=True)):
                names += [f"groups[{number}].{part}" for part in _differing_parts(ours, theirs)]
        elif name == "opaque" and left is not None and right is not None:
            names += [f"opaque.{part}" for part in _differing_parts(left, right)]
        else:
            names.append(name)
    return tuple(names)


def _differing_parts(a: KvGroup | OpaqueLayout, b: KvGroup | OpaqueLayout) -> list[str]:
    return [name for name in type(a).__slots__ if getattr(a, name) != getattr(b, name)]


def secret_from_file_content(content: bytes) -> bytes:
    """The 32-byte secret that a file stands for: its bytes if there are just 32, else their hash.

    Raises ValueError for fewer, so that an empty or cut-off file is not taken for a secret.
    """
    if len(content) < TENANT_SECRET_BYTES:
        raise ValueError(f"it has {len(content)} bytes, at least {TENANT_SECRET_BYTES} are needed")
    return content if len(content) == TENANT_SECRET_BYTES else blake3(content).digest()


def derive_hash_key(tenant_secret: bytes, keyspace: bytes) -> bytes:
    """The 32-byte key of a keyspace's chunk hashes: BLAKE3 of its id, keyed with the tenant's 32-byte secret."""
    if len(tenant_secret) != 32:
        raise InvalidRequest(f"tenant_secret must have 32 bytes, got {len(tenant_secret)}")
    if len(keyspace) != KEYSPACE_ID_BYTES:
        raise InvalidRequest(f"keyspace id must have {KEYSPACE_ID_BYTES} bytes, got {len(keyspace)}")
    return blake3(_HASH_KEY_MAGIC + keyspace, key=tenant_secret).digest()
