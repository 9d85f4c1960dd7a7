"""Nodes, locations, matches and events <-> messages of the index."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from struct import Struct

from kvpool.core import cluster
from kvpool.core.addresses import check_label, check_node_addresses
from kvpool.core.errors import InvalidRequest
from kvpool.core.location_digest import PART_COUNT, PartSpan, SplitGroup
from kvpool.core.outcome import Tier
from kvpool.v1 import common_pb2, index_pb2
from kvpool.wire.convert import check_count, check_id, check_optional_id, convert_items, enum_from_proto, is_newer

_HASH_BYTES = 16
_HASH = Struct(f"{_HASH_BYTES}s")
_KEPT_PARTS = 1024
_LAST_TIER = max(Tier)
_TIERS = {int(tier): tier for tier in Tier}


def node_info_to_proto(node: cluster.NodeInfo) -> index_pb2.NodeInfo:
    """What a node registers, or what the cluster knows of it."""
    return index_pb2.NodeInfo(
        node_id=node.node_id,
        kind=index_pb2.NodeKind.ValueType(node.kind),
        host_id=node.host_id,
        endpoint=node.endpoint,
        bulk_endpoint=node.bulk_endpoint,
        local_socket=node.local_socket,
        capacity_bytes=node.capacity_bytes,
        metrics_url=node.metrics_url,
        incarnation=node.incarnation,
        draining=node.draining,
    )


def node_info_from_proto(message: index_pb2.NodeInfo) -> cluster.NodeInfo:
    """Raises InvalidRequest for a malformed id, kind, endpoint or capacity."""
    return check_node_addresses(_node_info(message))


def _node_info(message: index_pb2.NodeInfo) -> cluster.NodeInfo:
    return cluster.NodeInfo(
        node_id=check_id(message.node_id, "node.node_id"),
        kind=enum_from_proto(message.kind, cluster.NodeKind, "node.kind"),
        host_id=message.host_id,
        endpoint=message.endpoint,
        bulk_endpoint=message.bulk_endpoint,
        local_socket=message.local_socket,
        capacity_bytes=check_count(message.capacity_bytes, "node.capacity_bytes"),
        metrics_url=message.metrics_url,
        incarnation=message.incarnation,
        draining=message.draining,
    )


def node_load_to_proto(load: cluster.NodeLoad) -> index_pb2.NodeLoad:
    """Load figures of a renewal."""
    return index_pb2.NodeLoad(
        arena_capacity_bytes=load.arena_capacity_bytes,
        arena_used_bytes=load.arena_used_bytes,
        disk_capacity_bytes=load.disk_capacity_bytes,
        disk_used_bytes=load.disk_used_bytes,
        page_count=load.page_count,
        disk_free_bytes=load.disk_free_bytes,
        reconcile_age_ms=load.reconcile_age_ms,
    )


def node_load_from_proto(message: index_pb2.NodeLoad) -> cluster.NodeLoad:
    """Raises InvalidRequest for negative figures."""
    return cluster.NodeLoad(
        arena_capacity_bytes=check_count(message.arena_capacity_bytes, "load.arena_capacity_bytes"),
        arena_used_bytes=check_count(message.arena_used_bytes, "load.arena_used_bytes"),
        disk_capacity_bytes=check_count(message.disk_capacity_bytes, "load.disk_capacity_bytes"),
        disk_used_bytes=check_count(message.disk_used_bytes, "load.disk_used_bytes"),
        page_count=check_count(message.page_count, "load.page_count"),
        disk_free_bytes=check_count(message.disk_free_bytes, "load.disk_free_bytes"),
        reconcile_age_ms=check_count(message.reconcile_age_ms, "load.reconcile_age_ms"),
    )


def live_node_to_proto(node: cluster.LiveNode) -> index_pb2.LiveNode:
    """One live node."""
    return index_pb2.LiveNode(
        info=node_info_to_proto(node.info),
        load=node_load_to_proto(node.load),
        lease_remaining_ms=node.lease_remaining_ms,
    )


def live_node_from_proto(message: index_pb2.LiveNode) -> cluster.LiveNode:
    """Raises InvalidRequest."""
    return cluster.LiveNode(
        info=node_info_from_proto(message.info),
        load=node_load_from_proto(message.load),
        lease_remaining_ms=message.lease_remaining_ms,
    )


def location_to_proto(location: cluster.Location) -> common_pb2.Location:
    """One place that holds a chunk."""
    return common_pb2.Location(
        node_id=location.node_id,
        incarnation=location.incarnation,
        tier=common_pb2.Tier.ValueType(location.tier),
        shards=location.shards,
    )


def location_from_proto(message: common_pb2.Location) -> cluster.Location:
    """Raises InvalidRequest for a malformed node id or tier."""
    return cluster.Location(
        node_id=check_id(message.node_id, "location.node_id"),
        incarnation=message.incarnation,
        tier=enum_from_proto(message.tier, Tier, "location.tier"),
        shards=message.shards,
    )


def known_locations_from_proto(messages: Iterable[common_pb2.Location]) -> tuple[cluster.Location, ...]:
    """Without those in tiers that only a newer release knows. Raises InvalidRequest naming the malformed one."""
    return tuple(
        convert_items([one for one in messages if not is_newer(one.tier, Tier)], location_from_proto, "location")
    )


def known_nodes_from_proto(messages: Iterable[index_pb2.NodeInfo]) -> tuple[cluster.NodeInfo, ...]:
    """Without those of kinds that only a newer release knows. Raises InvalidRequest."""
    return tuple(node_info_from_proto(one) for one in messages if is_node_known(one))


def is_node_known(message: index_pb2.NodeInfo) -> bool:
    """Whether the node is of a kind that this release knows."""
    return not is_newer(message.kind, cluster.NodeKind)


def location_change_to_proto(change: cluster.LocationChange) -> index_pb2.LocationChange:
    """One change of an announce batch."""
    return index_pb2.LocationChange(
        keyspace_id=change.keyspace,
        chunk_hash=change.chunk_hash,
        group_head_hash=change.group_head_hash,
        tier=common_pb2.Tier.ValueType(change.tier),
        added_shards=change.added_shards,
        removed_shards=change.removed_shards,
    )


def location_change_from_proto(message: index_pb2.LocationChange) -> cluster.LocationChange:
    """Raises InvalidRequest."""
    keyspace, chunk_hash, head = message.keyspace_id, message.chunk_hash, message.group_head_hash
    if not len(keyspace) == len(chunk_hash) == len(head) == _HASH_BYTES:
        for value, name in ((keyspace, "keyspace_id"), (chunk_hash, "chunk_hash"), (head, "group_head_hash")):
            check_id(value, name)
    tier = _TIERS.get(message.tier) or enum_from_proto(message.tier, Tier, "tier")
    return cluster.LocationChange(keyspace, chunk_hash, head, tier, message.added_shards, message.removed_shards)


def held_chunks_to_proto(changes: Iterable[cluster.LocationChange]) -> list[index_pb2.HeldChunks]:
    """What is added by changes that remove nothing: those alike in one message."""
    alike: dict[tuple[bytes, Tier, int], tuple[list[bytes], list[bytes]]] = {}
    for keyspace, chunk_hash, group_head_hash, tier, shards, _ in changes:
        kind = (keyspace, tier, shards)
        columns = alike.get(kind)
        if columns is None:
            columns = alike[kind] = ([], [])
        columns[0].append(chunk_hash)
        columns[1].append(group_head_hash)
    return [
        index_pb2.HeldChunks(
            keyspace_id=keyspace,
            tier=common_pb2.Tier.ValueType(tier),
            shards=shards,
            chunk_hashes=b"".join(hashes),
            group_head_hashes=b"".join(heads),
        )
        for (keyspace, tier, shards), (hashes, heads) in alike.items()
    ]


def held_chunks_from_proto(messages: Sequence[index_pb2.HeldChunks], *, most: int) -> list[cluster.LocationChange]:
    """The inverse. Raises InvalidRequest for more than `most` chunks, or naming the malformed item."""
    chunk_count = sum(len(one.chunk_hashes) for one in messages) // _HASH_BYTES
    if chunk_count > most:
        raise InvalidRequest(f"{chunk_count} chunks in one batch, at most {most} are allowed; split the request")
    return list(chain.from_iterable(convert_items(messages, _held_from_proto, "item of held", most=most)))


def _held_from_proto(message: index_pb2.HeldChunks) -> Iterator[cluster.LocationChange]:
    keyspace = check_id(message.keyspace_id, "keyspace_id")
    tier = enum_from_proto(message.tier, Tier, "tier")
    hashes, heads = message.chunk_hashes, message.group_head_hashes
    if not hashes:
        raise InvalidRequest("chunk_hashes names no chunk")
    if len(hashes) % _HASH_BYTES or len(heads) != len(hashes):
        raise InvalidRequest(
            f"chunk_hashes and group_head_hashes must have {_HASH_BYTES} bytes for each chunk, "
            f"got {len(hashes)} and {len(heads)}"
        )
    columns = repeat(keyspace), _hashes(hashes), _hashes(heads), repeat(tier), repeat(message.shards), repeat(0)
    return map(cluster.LocationChange, *columns)


def _hashes(packed: bytes) -> Iterator[bytes]:
    return chain.from_iterable(_HASH.iter_unpack(packed))


def part_span_to_proto(span: PartSpan, sequence: int, held: Sequence[index_pb2.HeldChunks]) -> index_pb2.ReplacePart:
    """All that a node holds in one part of a group."""
    return index_pb2.ReplacePart(
        sequence=sequence,
        keyspace_id=span.keyspace,
        group_head_hash=span.group_head,
        part=span.part,
        held=held,
    )


def part_span_from_proto(message: index_pb2.ReplacePart) -> PartSpan:
    """Raises InvalidRequest."""
    return PartSpan(
        keyspace=check_id(message.keyspace_id, "keyspace_id"),
        group_head=check_id(message.group_head_hash, "group_head_hash"),
        part=check_count(message.part, "part", most=PART_COUNT - 1),
    )


def split_group_to_proto(group: SplitGroup) -> index_pb2.SplitGroup:
    """A split group as one node sees it."""
    digests = group.digests if any(group.digests) else ()
    return index_pb2.SplitGroup(keyspace_id=group.keyspace, group_head_hash=group.group_head, digests=digests)


def split_group_from_proto(message: index_pb2.SplitGroup) -> SplitGroup:
    """Raises InvalidRequest."""
    if len(message.digests) not in (0, PART_COUNT):
        raise InvalidRequest(f"digests must be none or {PART_COUNT}, got {len(message.digests)}")
    return SplitGroup(
        keyspace=check_id(message.keyspace_id, "keyspace_id"),
        group_head=check_id(message.group_head_hash, "group_head_hash"),
        digests=list(message.digests) or [0] * PART_COUNT,
    )


def stale_location_to_proto(stale: cluster.StaleLocation) -> index_pb2.StaleLocation:
    """A location found to be wrong."""
    return index_pb2.StaleLocation(
        keyspace_id=stale.keyspace,
        chunk_hash=stale.chunk_hash,
        group_head_hash=stale.group_head_hash,
        location=location_to_proto(stale.location),
    )


def stale_location_from_proto(message: index_pb2.StaleLocation) -> cluster.StaleLocation:
    """Raises InvalidRequest."""
    return cluster.StaleLocation(
        keyspace=check_id(message.keyspace_id, "keyspace_id"),
        chunk_hash=check_id(message.chunk_hash, "chunk_hash"),
        group_head_hash=check_id(message.group_head_hash, "group_head_hash"),
        location=location_from_proto(message.location),
    )


def chain_query_to_proto(query: cluster.ChainQuery) -> index_pb2.MatchRequest:
    """A question about a chain."""
    return index_pb2.MatchRequest(
        keyspace_id=query.keyspace,
        chunk_hashes=query.chunk_hashes,
        first_chunk_index=query.first_chunk_index,
        group_head_hash=query.group_head_hash,
        shards=query.shards,
        host_id=query.host_id,
    )


def chain_query_from_proto(
    message: index_pb2.MatchRequest, chain: index_pb2.MatchChain | None = None, *, chunks_max: int
) -> cluster.ChainQuery:
    """chain: the one asked about, if another than that of `message`.

    Raises InvalidRequest for malformed or too many hashes, or a group head that is needed and missing.
    """
    about = message if chain is None else chain
    whole, left = divmod(len(about.chunk_hashes), 16)
    if left:
        raise InvalidRequest(f"chunk_hashes: item {whole} is cut off; send 16 bytes a hash", item_index=whole)
    check_count(whole, "number of chunk_hashes", most=chunks_max)
    first = check_count(about.first_chunk_index, "first_chunk_index")
    check_label(message.host_id, "host_id")  # short: the index keeps it a while
    head = check_optional_id(about.group_head_hash, "group_head_hash")
    if not head and first % cluster.CHAIN_GROUP_CHUNKS and whole:
        raise InvalidRequest(f"group_head_hash is needed because first_chunk_index {first} is no multiple of 16")
    return cluster.ChainQuery(
        keyspace=check_id(message.keyspace_id, "keyspace_id"),
        chunk_hashes=about.chunk_hashes,
        first_chunk_index=first,
        group_head_hash=head,
        shards=message.shards,
        host_id=message.host_id,
    )


def chain_match_to_proto(match: cluster.ChainMatch) -> index_pb2.MatchResponse:
    """The longest covered prefix."""
    runs = [
        index_pb2.MatchRun(chunk_count=run.chunk_count, locations=[location_to_proto(place) for place in run.locations])
        for run in match.runs
    ]
    nodes = [node_info_to_proto(node) for node in match.nodes.values()]
    return index_pb2.MatchResponse(matched_chunks=match.matched_chunks, runs=runs, nodes=nodes)


def chain_match_from_proto(message: index_pb2.MatchResponse) -> cluster.ChainMatch:
    """Raises InvalidRequest when the runs do not sum up to the matched chunks."""
    strange = {node.node_id for node in message.nodes if not is_node_known(node)}
    runs = tuple(
        cluster.MatchRun(
            chunk_count=check_count(run.chunk_count, "run.chunk_count", least=1),
            locations=tuple(
                [
                    _known_location(place.SerializeToString())
                    for place in run.locations
                    if place.tier <= _LAST_TIER and not (strange and place.node_id in strange)
                ]
            ),
        )
        for run in message.runs
    )
    if sum(run.chunk_count for run in runs) != message.matched_chunks:
        raise InvalidRequest(f"runs do not sum up to matched_chunks {message.matched_chunks}")
    for at, (sent, run) in enumerate(zip(message.runs, runs, strict=True)):
        if sent.locations and not run.locations:  # from here on it is where only a newer release can go
            runs = runs[:at]
            break
    named = [_known_node(node.SerializeToString()) for node in message.nodes if is_node_known(node)]
    return cluster.ChainMatch(
        matched_chunks=sum(run.chunk_count for run in runs), runs=runs, nodes={node.node_id: node for node in named}
    )


# Matches name the same few nodes again and again, and to check and convert one takes ten times as long as its bytes.
@functools.lru_cache(_KEPT_PARTS)
def _known_location(data: bytes) -> cluster.Location:
    return location_from_proto(common_pb2.Location.FromString(data))


@functools.lru_cache(_KEPT_PARTS)
def _known_node(data: bytes) -> cluster.NodeInfo:
    return node_info_from_proto(index_pb2.NodeInfo.FromString(data))
