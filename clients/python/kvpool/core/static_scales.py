"""Caches in fp8 with static scales: what one byte means is a matter of the model's calibration, not of the page.

Such a cache holds plain rows: dtype FP8_E4M3 (or E5M2), codec RAW, any layout. Its scales (one in all, one per layer or
one per layer and KV head) are fixed and in no page, so that engines with other scales must not share a keyspace: the
scales belong into its salt.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvpool.core.errors import InvalidRequest
from kvpool.core.geometry import KvGroup

STATIC_SCALES_SALT_BYTES = 32
_MAGIC = b"kvpool static scales 1\0"
_SHAPE = struct.Struct("<3I")


def static_scales_salt(group: KvGroup, *scales: npt.ArrayLike, salt: bytes = b"") -> bytes:
    """The salt of a keyspace whose cache is quantized with these scales: 32 bytes, equal for equal scales.

    scales: of K and of V (MLA: of the latent), as the whole model has them, never one rank's share, or TP would split
            the keyspace: each one number, [layers, 1] or [layers, kv_heads], rounded to float32 as engines do. What is
            equal for several layers or heads may be given either way.
    salt:   whatever else the engine would have put there.
    raises: InvalidRequest for other shapes, and for a scale that is not a positive float32.
    """
    if len(scales) != group.planes:
        raise InvalidRequest(f"scales must be {group.planes}, one for each of K and V or the latent, got {len(scales)}")
    shape = group.layers, group.kv_heads
    hasher = blake3(_MAGIC + _SHAPE.pack(len(scales), *shape))
    for number, given in enumerate(scales):
        values = np.asarray(given)
        if values.shape not in ((), (group.layers, 1), shape):
            raise InvalidRequest(f"scales[{number}] must be a number, [layers, 1] or {shape}, got {values.shape}")
        with np.errstate(over="ignore", invalid="ignore"):
            stored = values.astype("<f4")
        if not (np.isfinite(stored) & (stored > 0)).all():
            raise InvalidRequest(f"scales[{number}] must be positive float32 numbers")
        hasher.update(np.broadcast_to(stored, shape).tobytes())
    hasher.update(salt)
    return hasher.digest(length=STATIC_SCALES_SALT_BYTES)
