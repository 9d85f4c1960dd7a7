# ruff: noqa: INP001
"""Records the messages of a release as bytes: `python proto/testdata/record_messages.py`.

What a release wrote once is in messages-<release>.json for ever: later releases must read it, and mean the same by it
(tests/grpc/test_recorded_messages.py). So this refuses to write over a record; a release that adds to the messages gets
a record of its own.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

import kvpool
from kvpool.core.cache_axes import LAYOUTS
from kvpool.core.elements import Dtype
from kvpool.core.geometry import KvGroup
from kvpool.core.grid import ShardGrid
from kvpool.core.keyspace import KeyspaceSpec, encode_keyspace, keyspace_id
from kvpool.core.page import PageKey, page_bytes, seal
from kvpool.core.payload import payload_bytes
from kvpool.v1 import common_pb2, gpuagent_pb2, index_pb2, pagestore_pb2
from kvpool.wire.convert_engine import layout_to_proto
from kvpool.wire.convert_keyspace import spec_to_proto
from kvpool.wire.versions import own_version_to_proto

DIRECTORY = Path(__file__).parent
TENANT = "tenant"
SPEC = KeyspaceSpec(model_id="m", model_revision="r", groups=(KvGroup(1, 1, 8),), dtype=Dtype.FP32, chunk_tokens=16)
KEYSPACE = keyspace_id(encode_keyspace(TENANT, SPEC))
PAYLOAD_BYTES = payload_bytes(SPEC, ShardGrid.of(SPEC), 0)
PAGE_BYTES = page_bytes(PAYLOAD_BYTES)
CHUNK = bytes(range(16))
NODE = bytes(range(16, 32))
BLOCK_TOKENS, BLOCK_COUNT = 8, 8
BLOCK_IDS = b"".join(number.to_bytes(8, "little") for number in (5, 2))
KEY = PageKey(KEYSPACE, CHUNK, 0).pack()
TRACE = common_pb2.TraceContext(
    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", tracestate="vendor=1"
)


def main() -> int:
    """Write the record of this release; 1 if there is one."""
    path = DIRECTORY / f"messages-{'.'.join(kvpool.__version__.split('.')[:2])}.json"
    if path.exists():
        sys.stderr.write(f"{path.name} is there: what a release wrote stays as it was\n")
        return 1
    record = {name: _recorded(message) for name, message in messages()}
    path.write_text(json.dumps({"release": kvpool.__version__, "messages": record}, indent=1) + "\n")
    return 0


def _recorded(message: Message) -> dict[str, object]:
    return {
        "type": message.DESCRIPTOR.full_name,
        "hex": message.SerializeToString(deterministic=True).hex(),
        "means": MessageToDict(message, preserving_proto_field_name=True),
    }


def messages() -> Iterator[tuple[str, Message]]:
    """Name and message, in the order in which a session sends them."""
    yield from _index()
    yield from _pagestore()
    yield from _transfer()
    yield from _agent()
    yield from _every_field()


def _index() -> Iterator[tuple[str, Message]]:
    version, spec = own_version_to_proto(), spec_to_proto(SPEC)
    node = index_pb2.NodeInfo(
        node_id=NODE,
        kind=index_pb2.NODE_KIND_PAGESTORE,
        host_id="host",
        endpoint="10.0.0.1:7200",
        bulk_endpoint="10.0.0.1:7201",
        local_socket="/run/kvpool/pagestore.sock",
        capacity_bytes=1 << 40,
        metrics_url="http://10.0.0.1:9101/metrics",
    )
    yield "open_keyspace", index_pb2.OpenKeyspaceRequest(name="chat", spec=spec, version=version)
    yield (
        "register_node",
        index_pb2.RegisterNodeRequest(node=node, process_id=bytes(16), attempt=1, version=version),
    )
    match = index_pb2.MatchRequest(keyspace_id=KEYSPACE, chunk_hashes=CHUNK, shards=1, host_id="host")
    yield "match", index_pb2.MatchStreamRequest(request_id=7, match=match, trace=TRACE)
    more = [
        index_pb2.MatchChain(chunk_hashes=CHUNK),
        index_pb2.MatchChain(chunk_hashes=b"short"),
        index_pb2.MatchChain(chunk_hashes=NODE, first_chunk_index=1, group_head_hash=CHUNK),
    ]
    yield "match_several", index_pb2.MatchStreamRequest(request_id=8, match=match, more=more, trace=TRACE)
    change = index_pb2.LocationChange(
        keyspace_id=KEYSPACE, chunk_hash=CHUNK, group_head_hash=CHUNK, tier=common_pb2.TIER_STAGING, added_shards=1
    )
    batch = index_pb2.AnnounceBatch(sequence=1, changes=[change])
    yield "announce_batch", index_pb2.AnnounceRequest(batch=batch)
    place = common_pb2.Location(node_id=NODE, incarnation=3, tier=common_pb2.TIER_DISK, shards=1)
    found = index_pb2.MatchResponse(
        matched_chunks=1, runs=[index_pb2.MatchRun(chunk_count=1, locations=[place])], nodes=[node]
    )
    yield "match_answer", index_pb2.MatchStreamResponse(request_id=1, match=found)
    refused = index_pb2.MatchChainResult(error=common_pb2.ItemError(reason="INVALID_REQUEST", message="cut off"))
    again = index_pb2.MatchChainResult(match=index_pb2.MatchResponse(matched_chunks=1, runs=found.runs))
    yield "match_several_answer", index_pb2.MatchStreamResponse(request_id=1, match=found, more=[refused, again])
    yield (
        "open_keyspace_answer",
        index_pb2.OpenKeyspaceResponse(
            keyspace_id=KEYSPACE, hash_key=bytes(32), grid=_grid(), created=True, version=version
        ),
    )


def _pagestore() -> Iterator[tuple[str, Message]]:
    keyspace = pagestore_pb2.SessionKeyspace(keyspace_id=KEYSPACE, spec=spec_to_proto(SPEC))
    opening = pagestore_pb2.SessionOpen(keyspaces=[keyspace], peer_name="peer", version=own_version_to_proto())
    wish = pagestore_pb2.ReserveItem(key=KEY, page_bytes=PAGE_BYTES, metadata=_metadata())
    wanted = pagestore_pb2.AcquireItem(key=KEY, metadata=_metadata())
    for name, request in (
        ("open", pagestore_pb2.SessionRequest(request_id=1, open=opening)),
        (
            "reserve",
            pagestore_pb2.SessionRequest(request_id=2, reserve=pagestore_pb2.ReserveRequest(items=[wish]), trace=TRACE),
        ),
        ("commit", pagestore_pb2.SessionRequest(request_id=3, commit=pagestore_pb2.CommitRequest(lease_ids=[1]))),
        (
            "acquire",
            pagestore_pb2.SessionRequest(
                request_id=4, acquire=pagestore_pb2.AcquireRequest(items=[wanted], wait_ms=5000)
            ),
        ),
        ("release", pagestore_pb2.SessionRequest(request_id=5, release=pagestore_pb2.ReleaseRequest(lease_ids=[1]))),
        ("heartbeat", pagestore_pb2.SessionRequest(heartbeat=pagestore_pb2.SessionHeartbeat())),
        ("close", pagestore_pb2.SessionRequest(close=pagestore_pb2.SessionClose())),
    ):
        yield f"session_{name}", request
    slot = pagestore_pb2.Slot(lease_id=1, segment_id=65537, offset=8192, page_bytes=PAGE_BYTES)
    reserved = pagestore_pb2.ReserveResult(admission=pagestore_pb2.ADMISSION_RESERVED, slot=slot)
    hit = pagestore_pb2.AcquireResult(outcome=pagestore_pb2.OUTCOME_HIT, slot=slot, source=pagestore_pb2.SOURCE_DISK)
    yield (
        "session_reserve_answer",
        pagestore_pb2.SessionResponse(request_id=2, reserve=pagestore_pb2.ReserveResponse(results=[reserved])),
    )
    yield (
        "session_acquire_answer",
        pagestore_pb2.SessionResponse(request_id=4, acquire=pagestore_pb2.AcquireResponse(results=[hit], final=True)),
    )


def _transfer() -> Iterator[tuple[str, Message]]:
    keyspace = pagestore_pb2.SessionKeyspace(keyspace_id=KEYSPACE, spec=spec_to_proto(SPEC))
    version = own_version_to_proto()
    yield (
        "write_pages_open",
        pagestore_pb2.WritePagesRequest(open=pagestore_pb2.WritePagesOpen(keyspaces=[keyspace], version=version)),
    )
    page = bytearray(PAGE_BYTES)
    seal(page, PageKey.unpack(KEY), SPEC.codec, PAYLOAD_BYTES)
    frame = pagestore_pb2.PageFrame(page_bytes=PAGE_BYTES, key=KEY, metadata=_metadata(), data=bytes(page))
    yield "write_pages_frame", pagestore_pb2.WritePagesRequest(frame=frame)
    yield (
        "read_pages",
        pagestore_pb2.ReadPagesRequest(keys=[KEY], keyspaces=[keyspace], version=version),
    )


def _agent() -> Iterator[tuple[str, Message]]:
    layout = LAYOUTS["vllm"].layout(SPEC, range(1), range(1), BLOCK_TOKENS, BLOCK_COUNT)
    handles = [
        gpuagent_pb2.MemoryHandle(size_bytes=size_bytes, shared_memory=gpuagent_pb2.SharedMemoryHandle())
        for size_bytes in layout.handle_sizes
    ]
    register = gpuagent_pb2.EngineRegister(
        engine_name="engine",
        keyspace_name="chat",
        spec=spec_to_proto(SPEC),
        handles=handles,
        layout=layout_to_proto(layout),
        version=own_version_to_proto(),
    )
    store = gpuagent_pb2.EngineStoreRequest(
        chunk_hashes=CHUNK,
        block_ids=BLOCK_IDS,
        parent_hash=bytes(16),
        group_head_hashes=CHUNK,
        chain_head_hash=CHUNK,
        prompt_tokens=17,
    )
    load = gpuagent_pb2.EngineLoadRequest(
        chunk_hashes=CHUNK,
        block_ids=BLOCK_IDS,
        parent_hash=bytes(16),
        group_head_hashes=CHUNK,
        wait_ms=5000,
    )
    match = gpuagent_pb2.EngineMatchRequest(chunk_hashes=CHUNK)
    yield "engine_register", gpuagent_pb2.EngineRequest(request_id=1, register=register)
    yield "engine_match", gpuagent_pb2.EngineRequest(request_id=2, match=match, trace=TRACE)
    yield "engine_store", gpuagent_pb2.EngineRequest(request_id=3, store=store, trace=TRACE)
    kept = gpuagent_pb2.EngineKept(kept=True, chunk_count=1)
    yield "engine_kept", gpuagent_pb2.EngineRequest(request_id=3, kept=kept)
    yield "engine_load", gpuagent_pb2.EngineRequest(request_id=4, load=load, trace=TRACE)
    yield "engine_close", gpuagent_pb2.EngineRequest(request_id=5, close=gpuagent_pb2.EngineClose())
    run = gpuagent_pb2.EngineMatchRun(chunk_count=1, source=gpuagent_pb2.ENGINE_SOURCE_REMOTE, estimated_load_ms=1.5)
    found = gpuagent_pb2.EngineMatchResponse(matched_chunks=1, runs=[run])
    yield "engine_match_answer", gpuagent_pb2.EngineResponse(request_id=2, match=found)
    done = gpuagent_pb2.EngineLoadDone(loaded_chunks=1, tokens=common_pb2.TierTokens(remote=16))
    yield "engine_load_answer", gpuagent_pb2.EngineResponse(request_id=4, load_done=done)


def _every_field() -> Iterator[tuple[str, Message]]:
    """Every message of the API with all of its fields set, those in it empty; once more for each other kind of it."""
    for file in (common_pb2, gpuagent_pb2, index_pb2, pagestore_pb2):
        for name, described in sorted(file.DESCRIPTOR.message_types_by_name.items()):
            kinds = [one for oneof in described.oneofs for one in oneof.fields[1:]]
            chosen = [one for one in described.fields if one not in kinds]
            for fields in (chosen, *([one] for one in kinds)):
                message = getattr(file, name)()
                for field in fields:
                    _set(message, field)
                words = re.findall("[A-Z][a-z0-9]*", name)
                suffix = f"_{fields[0].name}" if fields is not chosen else ""
                yield f"every_field_of_{'_'.join(words).lower()}{suffix}", message


def _set(message: Message, field: FieldDescriptor) -> None:
    """Give a field a value that no other one has."""
    if field.message_type is not None:
        inner = getattr(message, field.name)
        inner.add() if field.is_repeated else inner.SetInParent()
        return
    values: dict[int, Any] = {
        FieldDescriptor.CPPTYPE_STRING: f"field {field.number}",
        FieldDescriptor.CPPTYPE_BOOL: True,
        FieldDescriptor.CPPTYPE_FLOAT: field.number + 0.5,
        FieldDescriptor.CPPTYPE_DOUBLE: field.number + 0.5,
    }
    value = values.get(field.cpp_type, 1000 + field.number)
    if field.type == FieldDescriptor.TYPE_BYTES:
        value = bytes([field.number] * 16)
    elif field.enum_type is not None:
        value = field.enum_type.values[-1].number
    if field.is_repeated:
        getattr(message, field.name).extend([value, value])
    else:
        setattr(message, field.name, value)


def _metadata() -> common_pb2.PageMetadata:
    return common_pb2.PageMetadata(parent_hash=bytes(16), group_head_hash=CHUNK, prompt_tokens=17)


def _grid() -> common_pb2.ShardGrid:
    grid = ShardGrid.of(SPEC)
    return common_pb2.ShardGrid(layer_groups=grid.layer_groups, splits=grid.splits)


if __name__ == "__main__":
    sys.exit(main())
