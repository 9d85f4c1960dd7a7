"""Keyspace specs <-> messages. Malformed input raises InvalidRequest naming the field."""

from __future__ import annotations

from collections.abc import Sequence

from kvpool.core.errors import InvalidRequest
from kvpool.core.keyspace import (
    DEFAULT_CHUNK_TOKENS,
    AttentionKind,
    Codec,
    Dtype,
    KeyspaceSpec,
    KvGroup,
    OpaqueLayout,
    PayloadKind,
)
from kvpool.v1 import common_pb2, pagestore_pb2
from kvpool.wire.convert import check_id, convert_items, enum_from_proto, is_newer


def spec_to_proto(spec: KeyspaceSpec) -> common_pb2.KeyspaceSpec:
    """The spec as it travels; chunk_tokens is always explicit."""
    opaque = None
    if spec.opaque is not None:
        opaque = common_pb2.OpaqueLayout(
            engine=spec.opaque.engine,
            layout_id=spec.opaque.layout_id,
            isa=spec.opaque.isa,
            block_tokens=spec.opaque.block_tokens,
            cell_bytes=spec.opaque.cell_bytes,
        )
    return common_pb2.KeyspaceSpec(
        model_id=spec.model_id,
        model_revision=spec.model_revision,
        groups=[_group_to_proto(group) for group in spec.groups],
        dtype=common_pb2.Dtype.ValueType(spec.dtype),
        codec=common_pb2.Codec.ValueType(spec.codec),
        chunk_tokens=spec.chunk_tokens,
        payload_kind=common_pb2.PayloadKind.ValueType(spec.payload),
        opaque=opaque,
        salt=spec.salt,
    )


def _group_to_proto(group: KvGroup) -> common_pb2.KvGroup:
    return common_pb2.KvGroup(
        layers=group.layers,
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        latent_dim=group.latent_dim,
        attention=common_pb2.AttentionKind.ValueType(group.attention),
        window_tokens=group.window_tokens,
        pages=group.pages if group.pages > 1 else 0,
    )


def is_spec_known(message: common_pb2.KeyspaceSpec) -> bool:
    """Whether this release knows all that it says; if not, the keyspace is one of newer engines."""
    known = (message.dtype, Dtype), (message.codec, Codec), (message.payload_kind, PayloadKind)
    attention = [(group.attention, AttentionKind) for group in message.groups]
    return not any(is_newer(value, kind) for value, kind in (*known, *attention))


def spec_from_proto(message: common_pb2.KeyspaceSpec, name: str = "spec") -> KeyspaceSpec:
    """raises: InvalidRequest naming the field, GeometryUnsupported naming what is not supported."""
    try:
        return KeyspaceSpec(
            model_id=message.model_id,
            model_revision=message.model_revision,
            groups=tuple(convert_items(message.groups, _group_from_proto, "group")),
            dtype=enum_from_proto(message.dtype, Dtype, "dtype"),
            codec=enum_from_proto(message.codec, Codec, "codec"),
            chunk_tokens=message.chunk_tokens or DEFAULT_CHUNK_TOKENS,
            payload=enum_from_proto(message.payload_kind, PayloadKind, "payload_kind"),
            opaque=_opaque_from_proto(message.opaque) if message.HasField("opaque") else None,
            salt=message.salt,
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error.message}") from error


def _group_from_proto(message: common_pb2.KvGroup) -> KvGroup:
    attention = enum_from_proto(message.attention, AttentionKind, "attention")
    return KvGroup(
        layers=message.layers,
        kv_heads=message.kv_heads,
        head_dim=message.head_dim,
        attention=attention,
        window_tokens=message.window_tokens,
        pages=message.pages or 1,
        latent_dim=message.latent_dim,
    )


def _opaque_from_proto(message: common_pb2.OpaqueLayout) -> OpaqueLayout:
    return OpaqueLayout(
        engine=message.engine,
        layout_id=message.layout_id,
        isa=message.isa,
        block_tokens=message.block_tokens,
        cell_bytes=message.cell_bytes,
    )


def keyspace_id_from_proto(value: bytes) -> bytes:
    """A 16-byte keyspace id of a list. Raises InvalidRequest."""
    return check_id(value, "keyspace_id")


def session_keyspaces_to_proto(
    keyspaces: Sequence[tuple[bytes, KeyspaceSpec]],
) -> list[pagestore_pb2.SessionKeyspace]:
    """(16-byte id, spec) pairs, as sessions and bulk streams name them."""
    return [pagestore_pb2.SessionKeyspace(keyspace_id=name, spec=spec_to_proto(spec)) for name, spec in keyspaces]


def session_keyspace_from_proto(message: pagestore_pb2.SessionKeyspace) -> tuple[bytes, KeyspaceSpec]:
    """raises: InvalidRequest naming the field, GeometryUnsupported."""
    return check_id(message.keyspace_id, "keyspace_id"), spec_from_proto(message.spec)
