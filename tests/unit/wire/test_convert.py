"""Converters: what goes out comes back, and what is malformed is refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.core import cluster
from kvpool.core.elements import Dtype
from kvpool.core.errors import ERRORS_BY_REASON, GeometryUnsupported, InvalidRequest, KvPoolError
from kvpool.core.geometry import AttentionKind, KvGroup, OpaqueLayout, PayloadKind
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.outcome import Tier
from kvpool.v1 import common_pb2, gpuagent_pb2, index_pb2
from kvpool.wire import (
    convert,
    convert_cluster,
    convert_engine,
    convert_grid,
    convert_keyspace,
    convert_pages,
    convert_watch,
)
from tests.fixtures.layout_presets import contiguous_layout

HASH = bytes(range(16))
MASKS = st.integers(0, (1 << 64) - 1)

SPECS = [
    KeyspaceSpec("llama", "r1", (KvGroup(32, 8, 128),), Dtype.BF16),
    KeyspaceSpec("deepseek", "r2", (KvGroup.mla(61, 576),), Dtype.BF16, chunk_tokens=64, salt=b"s"),
    KeyspaceSpec(
        "qwen",
        "r3",
        (KvGroup(4, 2, 64),),
        Dtype.FP32,
        payload=PayloadKind.OPAQUE,
        opaque=OpaqueLayout("vllm-cpu", "tiled", "x86_64", 16, 8192),
    ),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model_id)
def test_spec_comes_back(spec: KeyspaceSpec) -> None:
    assert convert_keyspace.spec_from_proto(convert_keyspace.spec_to_proto(spec)) == spec


def test_spec_chunk_tokens_zero_means_default() -> None:
    message = convert_keyspace.spec_to_proto(SPECS[0])
    message.chunk_tokens = 0
    assert convert_keyspace.spec_from_proto(message).chunk_tokens == 256


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("dtype", 0, "dtype"),
        ("codec", 99, "codec"),
        ("payload_kind", 0, "payload_kind"),
        ("model_id", "", "model_id"),
        ("chunk_tokens", 100, "chunk_tokens"),
        ("salt", b"x" * 65, "salt"),
    ],
)
def test_malformed_spec_is_refused_by_field(field: str, value: object, named: str) -> None:
    message = convert_keyspace.spec_to_proto(SPECS[0])
    setattr(message, field, value)
    with pytest.raises(InvalidRequest, match=named):
        convert_keyspace.spec_from_proto(message)


def test_malformed_group_is_refused_by_index() -> None:
    message = convert_keyspace.spec_to_proto(SPECS[0])
    message.groups[0].attention = common_pb2.ATTENTION_KIND_UNSPECIFIED
    with pytest.raises(InvalidRequest, match="group 0: attention"):
        convert_keyspace.spec_from_proto(message)


def test_a_state_space_is_refused_as_geometry() -> None:
    message = convert_keyspace.spec_to_proto(SPECS[0])
    message.groups[0].attention = common_pb2.AttentionKind.ValueType(AttentionKind.STATE_SPACE)
    with pytest.raises(GeometryUnsupported, match="state space"):
        convert_keyspace.spec_from_proto(message)


def test_a_sliding_window_survives_the_wire() -> None:
    group = replace(SPECS[0].group, attention=AttentionKind.SLIDING_WINDOW, window_tokens=128)
    spec = replace(SPECS[0], groups=(group,))
    assert convert_keyspace.spec_from_proto(convert_keyspace.spec_to_proto(spec)) == spec


def test_grid_of_another_version_is_refused() -> None:
    grid = ShardGrid.of(SPECS[0])
    message = convert_grid.grid_to_proto(grid)
    assert convert_grid.grid_from_proto(message, SPECS[0]) == grid
    message.layer_groups += 1
    with pytest.raises(InvalidRequest, match="grid"):
        convert_grid.grid_from_proto(message, SPECS[0])


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=40))
def test_hashes_come_back(hashes: list[bytes]) -> None:
    assert convert.hashes_from_bytes(convert.hashes_to_bytes(hashes)) == hashes


def test_malformed_hashes_are_refused_by_index() -> None:
    with pytest.raises(InvalidRequest, match="hash 1 "):
        convert.hashes_to_bytes([HASH, b"short"])
    with pytest.raises(InvalidRequest, match="item 2 is cut off") as raised:
        convert.hashes_from_bytes(HASH * 2 + b"x")
    assert raised.value.item_index == 2
    with pytest.raises(InvalidRequest, match="at most 1"):
        convert.hashes_from_bytes(HASH * 2, most=1)


def test_batches_name_the_malformed_item() -> None:
    def check(value: bytes) -> bytes:
        return convert.check_id(value, "key")

    with pytest.raises(InvalidRequest, match="change 1: key must be 16 bytes") as raised:
        convert.convert_items([HASH, b"", HASH], check, "change")
    assert raised.value.item_index == 1
    with pytest.raises(InvalidRequest, match="at most 2"):
        convert.convert_items([HASH] * 3, check, most=2)


@pytest.mark.parametrize("reason", sorted(ERRORS_BY_REASON))
def test_item_errors_come_back(reason: str) -> None:
    error = ERRORS_BY_REASON[reason]("what happened")
    back = convert.item_error_from_proto(convert.item_error_to_proto(error))
    assert type(back) is type(error)
    assert back.message == error.message


def test_item_error_of_a_newer_peer_shows_its_reason() -> None:
    back = convert.item_error_from_proto(common_pb2.ItemError(reason="NEW_TROUBLE", message="x"))
    assert type(back) is KvPoolError
    assert "NEW_TROUBLE" in back.message


def test_page_metadata_comes_back() -> None:
    plain = cluster.PageMetadata(parent_hash=HASH, chunk_index=17, group_head_hash=HASH)
    message = convert_pages.page_metadata_to_proto(plain)
    assert not message.HasField("retention")
    assert convert_pages.page_metadata_from_proto(message) == plain
    pinned = cluster.PageMetadata(
        parent_hash=HASH, chunk_index=0, group_head_hash=HASH, ttl_ms=5, priority=-3, pinned_until_us=9
    )
    assert convert_pages.page_metadata_from_proto(convert_pages.page_metadata_to_proto(pinned)) == pinned
    message.parent_hash = b"short"
    with pytest.raises(InvalidRequest, match="parent_hash"):
        convert_pages.page_metadata_from_proto(message)


@given(MASKS, MASKS, st.sampled_from(list(Tier)))
def test_location_changes_come_back(added: int, removed: int, tier: Tier) -> None:
    change = cluster.LocationChange(
        keyspace=HASH, chunk_hash=HASH, group_head_hash=HASH, tier=tier, added_shards=added, removed_shards=removed
    )
    message = convert_cluster.location_change_to_proto(change)
    assert convert_cluster.location_change_from_proto(message) == change


def test_what_is_held_comes_back_in_columns() -> None:
    kinds = [
        (b"a" * 16, Tier.DISK, 3),
        (b"a" * 16, Tier.STAGING, 3),
        (b"b" * 16, Tier.DISK, 3),
        (b"a" * 16, Tier.DISK, 1),
    ]
    changes = [
        cluster.LocationChange(keyspace, bytes([number]) * 16, bytes([number // 4]) * 16, tier, shards, 0)
        for number, (keyspace, tier, shards) in enumerate(kinds * 5)
    ]
    messages = convert_cluster.held_chunks_to_proto(changes)
    assert len(messages) == len(kinds), "those alike are one message"
    found = convert_cluster.held_chunks_from_proto(messages, most=len(changes))
    assert len(found) == len(changes) and set(found) == set(changes)
    with pytest.raises(InvalidRequest, match="20 chunks in one batch, at most 19"):
        convert_cluster.held_chunks_from_proto(messages, most=19)


@pytest.mark.parametrize(
    ("field", "value"),
    [("keyspace_id", b"short"), ("tier", 0), ("chunk_hashes", bytes(17)), ("group_head_hashes", bytes(16))],
)
def test_malformed_columns_are_refused(field: str, value: object) -> None:
    change = cluster.LocationChange(bytes(16), bytes(16), bytes(16), Tier.DISK, 1, 0)
    right, wrong = convert_cluster.held_chunks_to_proto([change, change._replace(added_shards=2)])
    wrong.chunk_hashes = wrong.group_head_hashes = bytes(32)
    setattr(wrong, field, value)
    with pytest.raises(InvalidRequest) as caught:
        convert_cluster.held_chunks_from_proto([right, wrong], most=10)
    assert caught.value.item_index == 1


def test_nodes_and_matches_come_back() -> None:
    node = cluster.NodeInfo(
        node_id=HASH, kind=cluster.NodeKind.PAGESTORE, endpoint="127.0.0.1:1", incarnation=7, capacity_bytes=5
    )
    place = cluster.Location(node_id=HASH, incarnation=7, tier=Tier.DISK, shards=3)
    match = cluster.ChainMatch(
        matched_chunks=5,
        runs=(
            cluster.MatchRun(chunk_count=2, locations=(place,)),
            cluster.MatchRun(chunk_count=3, locations=(place, place)),
        ),
        nodes={HASH: node},
    )
    message = convert_cluster.chain_match_to_proto(match)
    assert convert_cluster.chain_match_from_proto(message) == match
    message.matched_chunks = 6
    with pytest.raises(InvalidRequest, match="sum up"):
        convert_cluster.chain_match_from_proto(message)


@pytest.mark.parametrize("endpoint", ["nohost", ":1", "h:0", "h:65536", "h:x", "h:１"])
def test_malformed_endpoints_are_refused(endpoint: str) -> None:
    message = index_pb2.NodeInfo(node_id=HASH, kind=index_pb2.NODE_KIND_AGENT, endpoint=endpoint)
    with pytest.raises(InvalidRequest, match=r"node\.endpoint"):
        convert_cluster.node_info_from_proto(message)


def test_query_in_the_middle_of_a_group_needs_its_head() -> None:
    message = index_pb2.MatchRequest(keyspace_id=HASH, chunk_hashes=HASH * 3, first_chunk_index=5)
    with pytest.raises(InvalidRequest, match="group_head_hash is needed"):
        convert_cluster.chain_query_from_proto(message, chunks_max=10)
    message.group_head_hash = HASH
    assert convert_cluster.chain_query_from_proto(message, chunks_max=10).chunk_count == 3
    with pytest.raises(InvalidRequest, match="chunk_hashes"):
        convert_cluster.chain_query_from_proto(message, chunks_max=2)


def test_a_chain_query_names_no_endless_host() -> None:
    """An index keeps what it found out for a host a while, so that the host's name must not be of any length."""
    message = index_pb2.MatchRequest(keyspace_id=bytes(16), chunk_hashes=bytes(16), host_id="h" * 1024)
    assert convert_cluster.chain_query_from_proto(message, chunks_max=1).host_id == message.host_id
    message.host_id += "h"
    with pytest.raises(InvalidRequest, match="host_id"):
        convert_cluster.chain_query_from_proto(message, chunks_max=1)


@pytest.mark.parametrize(
    "event",
    [
        cluster.ChunkEvent(
            keyspace=HASH,
            chunk_hash=HASH[:8],
            group_head_hash=HASH,
            locations=(cluster.Location(node_id=HASH, incarnation=1, tier=Tier.STAGING, shards=1),),
            version=4,
        ),
        cluster.NodeEvent(node=cluster.NodeInfo(node_id=HASH, kind=cluster.NodeKind.AGENT), alive=False),
        cluster.ResyncEvent(cause="behind"),
        cluster.ResyncEvent(cause="gap", nodes=(cluster.NodeInfo(node_id=HASH, kind=cluster.NodeKind.PAGESTORE),)),
        cluster.HeartbeatEvent(age_ms=12, watch_age_ms=345),
        cluster.ChunkBatch(
            events=(cluster.ChunkEvent(keyspace=HASH, chunk_hash=HASH, group_head_hash=HASH, locations=(), version=5),)
        ),
    ],
)
def test_events_come_back(
    event: cluster.ChunkEvent | cluster.NodeEvent | cluster.ResyncEvent | cluster.HeartbeatEvent | cluster.ChunkBatch,
) -> None:
    value = cluster.IndexEvent(position="p1", event=event)
    assert convert_watch.index_event_from_proto(convert_watch.index_event_to_proto(value)) == value


def test_layout_comes_back() -> None:
    spec = SPECS[0]
    layout = contiguous_layout(spec, range(4), range(8), 16, 10)
    message = convert_engine.layout_to_proto(layout)
    handles = [gpuagent_pb2.MemoryHandle(size_bytes=size) for size in layout.handle_sizes]
    assert convert_engine.layout_from_proto(message, handles) == layout
    with pytest.raises(InvalidRequest, match=r"handles\[0\]"):
        convert_engine.layout_from_proto(message, [gpuagent_pb2.MemoryHandle()])


def test_block_ids() -> None:
    assert np.frombuffer(convert_engine.block_ids_to_bytes([3, 0, 9]), "<i8").tolist() == [3, 0, 9]


def test_what_a_node_holds_is_bounded_by_chunks_and_by_items() -> None:
    empty = index_pb2.HeldChunks(keyspace_id=b"k" * 16, tier=common_pb2.TIER_DISK, shards=1)
    with pytest.raises(InvalidRequest, match="names no chunk"):
        convert_cluster.held_chunks_from_proto([empty], most=8)
    with pytest.raises(InvalidRequest, match="at most 8 are allowed"):
        convert_cluster.held_chunks_from_proto([empty] * 9, most=8)
