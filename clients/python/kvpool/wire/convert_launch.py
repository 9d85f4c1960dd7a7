"""Launches <-> messages. Malformed input raises InvalidRequest naming the field."""

from __future__ import annotations

import numpy as np

from kvpool.core.errors import InvalidRequest
from kvpool.core.launches import MOST_LAUNCH_PAGES, Launch, Launched, LaunchKind, LaunchPage
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert import check_count, enum_from_proto, item_error_from_proto, item_error_to_proto
from kvpool.wire.convert_engine import block_ids_to_bytes

_BLOCK_ID = np.dtype("<i8")


def launch_to_proto(launch: Launch) -> gpuagent_pb2.EngineLaunch:
    """One launch."""
    return gpuagent_pb2.EngineLaunch(
        ticket=launch.ticket,
        kind=gpuagent_pb2.LaunchKind.ValueType(launch.kind),
        pages=[
            gpuagent_pb2.LaunchPage(
                shard=page.shard, chunk=page.chunk, scratch_offset=page.scratch_offset, skip_tokens=page.skip_tokens
            )
            for page in launch.pages
        ],
        block_ids=block_ids_to_bytes(launch.block_ids),
        sums=launch.sums,
    )


def launch_from_proto(message: gpuagent_pb2.EngineLaunch, blocks_per_chunk: int) -> Launch:
    """One launch; whether it fits cache and scratch is Launch.check's to say."""
    check_count(len(message.pages), "the number of pages", most=MOST_LAUNCH_PAGES)
    if len(message.block_ids) % (blocks_per_chunk * _BLOCK_ID.itemsize):
        raise InvalidRequest(f"block_ids must be little-endian int64, {blocks_per_chunk} for each chunk")
    blocks = np.frombuffer(message.block_ids, dtype=_BLOCK_ID).astype(np.int64, copy=False)
    return Launch(
        ticket=message.ticket,
        kind=enum_from_proto(message.kind, LaunchKind, "kind"),
        pages=tuple(
            LaunchPage(page.shard, page.chunk, page.scratch_offset, page.skip_tokens) for page in message.pages
        ),
        block_ids=blocks.reshape(-1, blocks_per_chunk),
        sums=message.sums,
    )


def launched_to_proto(launched: Launched) -> gpuagent_pb2.EngineLaunched:
    """How a launch ended."""
    return gpuagent_pb2.EngineLaunched(
        ticket=launched.ticket,
        faults=[gpuagent_pb2.LaunchFault(page=page, block=block) for page, block in launched.faults],
        error=item_error_to_proto(launched.error) if launched.error is not None else None,
    )


def launched_from_proto(message: gpuagent_pb2.EngineLaunched) -> Launched:
    """How a launch ended; whether its faults are those of its pages is Launched.found's to say."""
    check_count(len(message.faults), "the number of faults", most=MOST_LAUNCH_PAGES)
    return Launched(
        ticket=message.ticket,
        faults=tuple((fault.page, fault.block) for fault in message.faults),
        error=item_error_from_proto(message.error) if message.HasField("error") else None,
    )
