import struct
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core.errors import GeometryUnsupported, InvalidRequest, KvPoolError
from kvpool.core.keyspace import (
    PUBLISHED_TENANT_SECRET,
    AttentionKind,
    Codec,
    Dtype,
    KeyspaceSpec,
    KvGroup,
    OpaqueLayout,
    PayloadKind,
    decode_keyspace,
    derive_hash_key,
    differing_fields,
    encode_keyspace,
    keyspace_id,
)
from kvpool.wire.convert_keyspace import spec_from_proto, spec_to_proto
from tests.unit.core.strategies import names, specs
from tests.unit.core.vectors import load_vectors

GROUP = KvGroup(layers=4, kv_heads=2, head_dim=16)
SPEC = KeyspaceSpec("model", "rev", (GROUP,), Dtype.BF16)
OPAQUE = OpaqueLayout("vllm-cpu", "amx-v1", "x86_64-amx", 16, 4096)
OPAQUE_SPEC = replace(SPEC, payload=PayloadKind.OPAQUE, opaque=OPAQUE)


@given(names, specs())
def test_an_encoding_decodes_to_what_was_encoded(tenant: str, spec: KeyspaceSpec) -> None:
    assert decode_keyspace(encode_keyspace(tenant, spec)) == (tenant, spec)


@given(names, specs(), names, specs())
def test_different_keyspaces_have_different_encodings(
    tenant: str, spec: KeyspaceSpec, other_tenant: str, other: KeyspaceSpec
) -> None:
    same = encode_keyspace(tenant, spec) == encode_keyspace(other_tenant, other)
    assert same == ((tenant, spec) == (other_tenant, other))


CHANGES: dict[str, Any] = {
    "model_id": "model2",
    "model_revision": "rev2",
    "dtype": Dtype.FP16,
    "codec": Codec.INT8_GROUP8,
    "chunk_tokens": 512,
    "salt": b"s",
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_field_counts_and_is_named(name: str) -> None:
    changed = replace(SPEC, **{name: CHANGES[name]})
    assert keyspace_id(encode_keyspace("t", changed)) != keyspace_id(encode_keyspace("t", SPEC))
    assert differing_fields(SPEC, changed) == (name,)


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim"])
def test_differences_of_geometry_are_named_down_to_the_number(name: str) -> None:
    larger: dict[str, Any] = {name: 24}
    changed = replace(SPEC, groups=(replace(GROUP, **larger),))
    assert encode_keyspace("t", changed) != encode_keyspace("t", SPEC)
    assert differing_fields(SPEC, changed) == (f"groups[0].{name}",)


@pytest.mark.parametrize("name, value", [("isa", "x"), ("block_tokens", 32), ("cell_bytes", 1)])
def test_differences_of_opaque_layouts_are_named(name: str, value: Any) -> None:
    changed = replace(OPAQUE_SPEC, opaque=replace(OPAQUE, **{name: value}))
    assert encode_keyspace("t", changed) != encode_keyspace("t", OPAQUE_SPEC)
    assert differing_fields(OPAQUE_SPEC, changed) == (f"opaque.{name}",)
    assert set(differing_fields(SPEC, OPAQUE_SPEC)) == {"payload", "opaque"}
    assert differing_fields(SPEC, SPEC) == ()


def test_what_moves_between_neighbouring_strings_counts() -> None:
    ids = {
        encode_keyspace(tenant, replace(SPEC, model_id=model, model_revision=revision))
        for tenant, model, revision in [("a", "bc", "d"), ("ab", "c", "d"), ("a", "b", "cd")]
    }
    assert len(ids) == 3


@given(names, specs(), st.data())
def test_only_canonical_encodings_decode(tenant: str, spec: KeyspaceSpec, data: st.DataObject) -> None:
    encoding = bytearray(encode_keyspace(tenant, spec))
    at = data.draw(st.integers(0, len(encoding) - 1))
    changed = data.draw(
        st.sampled_from(
            [
                bytes(encoding[:at]),
                bytes(encoding) + b"\0",
                bytes(encoding[:at] + encoding[at + 1 :]),
                bytes(encoding[:at] + bytes([encoding[at] ^ data.draw(st.integers(1, 255))]) + encoding[at + 1 :]),
            ]
        )
    )
    try:
        decoded = decode_keyspace(changed)
    except (InvalidRequest, GeometryUnsupported):
        return
    assert encode_keyspace(*decoded) == changed
    assert decoded != (tenant, spec)


@given(st.binary(max_size=200))
def test_noise_does_not_decode(noise: bytes) -> None:
    with pytest.raises(InvalidRequest, match="malformed"):
        decode_keyspace(noise)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_id": ""}, "model_id"),
        ({"model_revision": "x" * 1025}, "model_revision"),
        ({"model_id": "\ud800"}, "model_id is not valid Unicode"),
        ({"chunk_tokens": 8}, r"chunk_tokens must be an integer in \[16, 4096\]"),
        ({"chunk_tokens": 8192}, "chunk_tokens"),
        ({"chunk_tokens": 24}, "power of two"),
        ({"dtype": 1}, "dtype must be a Dtype"),
        ({"codec": 9}, "codec must be a Codec"),
        ({"salt": bytes(65)}, "salt must have at most 64 bytes"),
        ({"groups": ()}, "groups"),
        ({"groups": (KvGroup(4, 2, 15),), "dtype": Dtype.INT4}, "dtype: a row of 15 elements"),
        ({"groups": (KvGroup(4, 2, 12),), "codec": Codec.INT8_GROUP8}, "codec: rows of 12 elements"),
        ({"payload": PayloadKind.OPAQUE}, "opaque must be set exactly"),
        ({"opaque": OPAQUE}, "opaque must be set exactly"),
        (
            {"payload": PayloadKind.OPAQUE, "opaque": replace(OPAQUE, block_tokens=48)},
            "multiple of opaque.block_tokens",
        ),
        ({"payload": PayloadKind.OPAQUE, "opaque": OPAQUE, "codec": Codec.FP8_E4M3}, "FP8_E4M3 cannot take opaque"),
    ],
)
def test_bad_specifications_are_refused_naming_the_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        replace(SPEC, **changes)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"layers": 0}, "groups.layers"),
        ({"kv_heads": -1}, "groups.kv_heads"),
        ({"head_dim": 0}, "groups.head_dim"),
        ({"head_dim": True}, "groups.head_dim"),
        ({"latent_dim": 576}, "MLA .* wants kv_heads 1 and head_dim 0"),
    ],
)
def test_bad_geometry_is_refused_naming_the_field(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        replace(GROUP, **values)


@pytest.mark.parametrize(
    "groups, words",
    [
        ((GROUP, GROUP), "one KV group, got 2"),
        ((GROUP, replace(GROUP, attention=AttentionKind.STATE_SPACE)), r"groups\[1\] has state space .* set opaque"),
    ],
)
def test_models_that_are_not_supported_are_refused_by_name(groups: tuple[KvGroup, ...], words: str) -> None:
    with pytest.raises(GeometryUnsupported, match=words):
        replace(SPEC, groups=groups)


@pytest.mark.parametrize(
    "group",
    [
        replace(GROUP, window_tokens=128),
        replace(GROUP, attention=AttentionKind.SLIDING_WINDOW),
        replace(GROUP, attention=AttentionKind.GROUPED_WINDOW),
    ],
)
def test_a_window_belongs_to_sliding_window_attention_alone(group: KvGroup) -> None:
    with pytest.raises(InvalidRequest, match=r"groups\[0\].window_tokens"):
        replace(SPEC, groups=(group,))


def test_a_sliding_window_is_part_of_the_identity() -> None:
    window = replace(GROUP, attention=AttentionKind.SLIDING_WINDOW, window_tokens=128)
    grouped = replace(window, attention=AttentionKind.GROUPED_WINDOW)
    specs = [replace(SPEC, groups=(group,)) for group in (GROUP, window, replace(window, window_tokens=256), grouped)]
    assert len({encode_keyspace("a", spec) for spec in specs}) == 4
    assert [decode_keyspace(encode_keyspace("a", spec))[1] for spec in specs] == specs
    assert differing_fields(specs[1], specs[2]) == ("groups[0].window_tokens",)


def test_pages_of_a_chunk_are_part_of_the_identity() -> None:
    bases = SPEC, OPAQUE_SPEC
    specs = [replace(spec, groups=(replace(GROUP, pages=pages),)) for spec in bases for pages in (1, 2, 9)]
    assert len({encode_keyspace("a", spec) for spec in specs}) == 6
    assert [decode_keyspace(encode_keyspace("a", spec))[1] for spec in specs] == specs
    assert [spec_from_proto(spec_to_proto(spec)) for spec in specs] == specs
    assert differing_fields(specs[0], specs[1]) == ("groups[0].pages",)
    with pytest.raises(InvalidRequest, match=r"groups.pages"):
        replace(GROUP, pages=257)


def test_tenant_and_secret_decide_the_hash_key() -> None:
    ours, theirs = (keyspace_id(encode_keyspace(tenant, SPEC)) for tenant in ("a", "b"))
    keys = {derive_hash_key(secret, ks) for secret in (PUBLISHED_TENANT_SECRET, bytes(32)) for ks in (ours, theirs)}
    assert len(keys) == 4 and {len(key) for key in keys} == {32}
    for secret, keyspace in ((b"short", ours), (bytes(32), b"short")):
        with pytest.raises(KvPoolError, match="bytes, got 5"):
            derive_hash_key(secret, keyspace)


def encode_by_hand(tenant: str, spec: dict[str, Any]) -> bytes:
    """The encoding, straight from its description."""

    def number(value: int) -> bytes:
        return struct.pack("<I", value)

    (group,) = spec["groups"]
    geometry = [group[k] for k in ("layers", "kv_heads", "head_dim", "latent_dim", "attention", "window_tokens")]
    values = [tenant.encode(), spec["model_id"].encode(), spec["model_revision"].encode()]
    values += [b"".join(map(number, geometry))]
    values += [number(spec[k]) for k in ("dtype", "codec", "chunk_tokens", "payload")]
    values += [bytes.fromhex(spec["salt"])]
    pages = [number(group["pages"])] if group.get("pages", 1) > 1 else []
    if spec["opaque"]:
        values += [spec["opaque"][k].encode() for k in ("engine", "layout_id", "isa")]
        values += [number(spec["opaque"][k]) for k in ("block_tokens", "cell_bytes")]
    values += pages
    fields = (bytes([tag]) + number(len(value)) + value for tag, value in enumerate(values, start=1))
    return b"kvpool keyspace encoding 1\0" + b"".join(fields)


@pytest.mark.parametrize("vector", load_vectors("keyspace_vectors.json"), ids=lambda vector: vector["name"])
def test_vectors(vector: dict[str, Any]) -> None:
    encoding = encode_by_hand(vector["tenant"], vector["spec"])
    assert encoding.hex() == vector["encoding"]
    tenant, spec = decode_keyspace(encoding)
    assert encode_keyspace(tenant, spec) == encoding
    assert (tenant, spec.model_id, spec.chunk_tokens) == (
        vector["tenant"],
        vector["spec"]["model_id"],
        vector["spec"]["chunk_tokens"],
    )
    assert keyspace_id(encoding).hex() == blake3(encoding).hexdigest()[:32] == vector["keyspace_id"]
    by_hand = blake3(b"kvpool chunk hash key 1\0" + keyspace_id(encoding), key=b"kvpool: no tenant secret is set.")
    assert derive_hash_key(PUBLISHED_TENANT_SECRET, keyspace_id(encoding)).hex() == vector["hash_key"]
    assert by_hand.hexdigest() == vector["hash_key"]
