"""A whole payload through its keyspace's codec: plane by plane, so that what is in work fits into a core's cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvpool.core.codecs import decode_rows, encode_rows
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.payload import ShardPayload

Bytes = npt.NDArray[np.uint8]


def engine_rows_bytes(spec: KeyspaceSpec, shape: ShardPayload) -> int:
    """Bytes of a shard's rows as an engine's cache of `spec.dtype` holds them."""
    return len(shape.layers) * shape.planes * shape.positions * len(shape.heads) * spec.engine_row_bytes


def encode_payload(spec: KeyspaceSpec, shape: ShardPayload, rows: Bytes, payload: Bytes) -> None:
    """Fill a payload.

    rows:    [engine_rows_bytes] uint8, in payload order: [layer][k, v][position][head][element].
    payload: [payload_bytes] uint8. The codec is not lossless; codec errors as encode_rows.
    """
    for plane, data, scales in _planes(spec, shape, rows, payload):
        data[...], scales[...] = encode_rows(spec.codec, spec.dtype, plane)


def decode_payload(spec: KeyspaceSpec, shape: ShardPayload, payload: Bytes) -> Bytes:
    """The rows that a payload stands for. Shapes are those of encode_payload; returns a new array."""
    rows = np.empty(engine_rows_bytes(spec, shape), dtype=np.uint8)
    for plane, data, scales in _planes(spec, shape, rows, payload):
        plane[...] = decode_rows(spec.codec, spec.dtype, data, scales)
    return rows


def _planes(
    spec: KeyspaceSpec, shape: ShardPayload, rows: Bytes, payload: Bytes
) -> Iterator[tuple[Bytes, Bytes, Bytes]]:
    """Views of each plane's rows, data and scales: [positions * heads, bytes]."""
    plane_rows = (len(shape.layers) * shape.planes, shape.positions * len(shape.heads))
    data, scales = payload[: shape.data_bytes], payload[shape.data_bytes : shape.payload_bytes]
    yield from zip(
        rows.reshape(*plane_rows, spec.engine_row_bytes),
        data.reshape(*plane_rows, shape.row_bytes),
        scales.reshape(*plane_rows, shape.scale_row_bytes),
        strict=True,
    )
