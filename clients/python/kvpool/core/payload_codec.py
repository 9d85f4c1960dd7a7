"""A whole payload through its keyspace's codec: some rows at a time, so that what is in work fits a core's cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvpool.core.codecs import decode_rows, encode_rows
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.payload import ShardPayload

Bytes = npt.NDArray[np.uint8]
_SLICE_BYTES = 64 << 10  # of engine rows


def engine_rows_bytes(spec: KeyspaceSpec, shape: ShardPayload) -> int:
    """Bytes of a shard's rows as an engine's cache of `spec.dtype` holds them."""
    return shape.row_count * spec.engine_row_bytes


def encode_payload(spec: KeyspaceSpec, shape: ShardPayload, rows: Bytes, payload: Bytes) -> None:
    """Fill a payload.

    rows:    [engine_rows_bytes] uint8, in payload order.
    payload: [payload_bytes] uint8. The codec is not lossless; codec errors as encode_rows.
    """
    for part, data, scales in _slices(spec, shape, rows, payload):
        data[...], scales[...] = encode_rows(spec.codec, spec.dtype, part)


def decode_payload(spec: KeyspaceSpec, shape: ShardPayload, payload: Bytes) -> Bytes:
    """The rows that a payload stands for. Shapes are those of encode_payload; returns a new array."""
    rows = np.empty(engine_rows_bytes(spec, shape), dtype=np.uint8)
    for part, data, scales in _slices(spec, shape, rows, payload):
        part[...] = decode_rows(spec.codec, spec.dtype, data, scales)
    return rows


def _slices(
    spec: KeyspaceSpec, shape: ShardPayload, rows: Bytes, payload: Bytes
) -> Iterator[tuple[Bytes, Bytes, Bytes]]:
    """Views of the same rows as an engine has them, of their data and of their scales: [count, bytes]."""
    data, scales = payload[: shape.data_bytes], payload[shape.data_bytes : shape.payload_bytes]
    parts = (
        rows.reshape(shape.row_count, spec.engine_row_bytes),
        data.reshape(shape.row_count, shape.row_bytes),
        scales.reshape(shape.row_count, shape.scale_row_bytes),
    )
    count = max(1, _SLICE_BYTES // spec.engine_row_bytes)
    for first in range(0, shape.row_count, count):
        yield parts[0][first : first + count], parts[1][first : first + count], parts[2][first : first + count]
