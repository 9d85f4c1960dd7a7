"""What the codecs that are not lossless do to rows, in exactly specified arithmetic: equal bytes on every device.

All steps are float32, each result rounded to nearest even, no two steps contracted into one. `x` are the elements of a
scale group (8 consecutive elements of a row, or the whole row) widened to float32, `limit` is 127 (int8), 7 (int4) or
448 (fp8 e4m3).

Encoding a group
    largest = max |x|, an infinity taken as the largest finite value of the engine's type
    scale   = (largest / limit) rounded to the scale's type: what is stored, and what all the rest uses
    y       = x * (1 / scale), clamped to [-limit, limit]
    int8, int4: y rounded to the nearest even integer. int4: two's complement, element 2i in the low nibble of byte i
    fp8 e4m3:   y rounded to nearest even, subnormal below 2**-6; -0 keeps its sign. Bytes 0x7f and 0xff never occur
    Groups with largest < 2**-100, or whose scale rounds to 0 (fp16 only, largest < 127 * 2**-25), store scale 0 and 0s
    Groups with a NaN store a quiet NaN as scale and 0s: a broken computation stays visible, in all of its group

Decoding
    value * scale, clamped to the finite range of the engine's type, then rounded to that type
    Scales below 2**-110 count as 0. A scale that is NaN or infinite makes its group quiet NaNs; so do the fp8 bytes
    0x7f and 0xff for their own element (no encoder here writes such scales and bytes; an engine's own cache may)

No step has a subnormal float32 operand or result that matters, so flushing them to zero changes no byte.

Errors, |decoded - x|, for a group with largest |x| = m; u = 2**-8 (bf16), 2**-11 (fp16) or 2**-24 (fp32) is the
engine type's own rounding. `error_bound` is the first column exactly, and holds for every input without NaN or infinity
    | codec       | at most                   | RMS where fractions of a step are equally likely: at most |
    | INT8_GROUP8 | m * (1 / 254 + u) (1 + u) | m * sqrt(1 / (127 ** 2 * 12) + u ** 2 / 3) * 1.05         |
    | FP8_E4M3    | m * (1 / 28 + u)          | m * sqrt(1 / (28 ** 2 * 3) + u ** 2 / 3) * 1.05           |
    | INT4_GROUP8 | m * (1 / 14 + u) (1 + u)  | m * sqrt(1 / (7 ** 2 * 12) + u ** 2 / 3) * 1.05           |
plus 2**-100 (bf16, fp32) or 2**-24 (fp8), 9 * 2**-25 (int4), 129 * 2**-25 (int8) where fp16 itself runs out of small
numbers. Normally distributed bf16 elements come back with a relative RMS error of 0.0048, 0.027 and 0.083.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.core.elements import Codec, Dtype
from kvpool.core.errors import InvalidRequest

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint32]
Doubles = npt.NDArray[np.float64]

MAGNITUDE_BITS = 0x7FFFFFFF
INFINITY_BITS = 0x7F800000
ZERO_BELOW_BITS = (127 - 100) << 23
"""2**-100: groups whose largest magnitude is smaller are zeros."""
ZERO_SCALE_BELOW_BITS = (127 - 110) << 23
"""2**-110: smaller scales count as 0. Scales that are written are at least 2**-100 / 448, or those of fp16."""
_INTEGER_MAGIC = np.float32(3 << 22)  # adding 1.5 * 2**23 leaves the nearest even integer in the low bits
_SUBNORMAL_MAGIC = np.float32(1 << 14)  # the same for multiples of 2**-9, the subnormals of e4m3
_SMALLEST_NORMAL_BITS = (127 - 6) << 23  # 2**-6, of e4m3


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatType:
    """An engine type that can be quantized. Bit patterns are those of the type, but largest_bits of float32."""

    largest_bits: int  # the largest finite value
    nan_bits: int
    unit_roundoff: float
    smallest_step: float  # between neighbours around 0; 0.0 where that is far below 2**-100


FLOAT_TYPES: Mapping[Dtype, FloatType] = MappingProxyType(
    {
        Dtype.BF16: FloatType(largest_bits=0x7F7F0000, nan_bits=0x7FC0, unit_roundoff=2.0**-8, smallest_step=0.0),
        Dtype.FP16: FloatType(largest_bits=0x477FE000, nan_bits=0x7E00, unit_roundoff=2.0**-11, smallest_step=2.0**-24),
        Dtype.FP32: FloatType(largest_bits=0x7F7FFFFF, nan_bits=0x7FC00000, unit_roundoff=2.0**-24, smallest_step=0.0),
    }
)
LIMITS: Mapping[Codec, float] = MappingProxyType(
    {Codec.INT8_GROUP8: 127.0, Codec.FP8_E4M3: 448.0, Codec.INT4_GROUP8: 7.0}
)
_STEPS: Mapping[Codec, float] = MappingProxyType(
    {Codec.INT8_GROUP8: 1.0, Codec.FP8_E4M3: 32.0, Codec.INT4_GROUP8: 1.0}
)  # between neighbours next to the limit


def encode_rows(codec: Codec, dtype: Dtype, rows: Bytes) -> tuple[Bytes, Bytes]:
    """Quantize rows.

    rows:    [..., row_bytes] uint8, C-contiguous: elements of `dtype`.
    returns: ([..., data_row_bytes], [..., scale_row_bytes]) uint8, new arrays.
    raises:  InvalidRequest for a codec without scales, other elements, or rows that are no multiple of the scale group.
    """
    elements, group_elements = _check(codec, dtype, rows.shape[-1] * 8 // dtype.bits)
    grouped = (*rows.shape[:-1], elements // group_elements, group_elements)
    x = _widened(rows, dtype).reshape(grouped)
    largest = _largest(x.view(np.uint32) & np.uint32(MAGNITUDE_BITS))
    scale_bytes, inverses, is_live = _scales(codec, dtype, largest)
    limit = np.float32(LIMITS[codec])
    with np.errstate(over="ignore", invalid="ignore"):  # infinities are clamped, and NaNs are not taken
        y = x * _spread(inverses, group_elements)
    if not is_live.all():
        y[~is_live] = 0
    np.clip(y, -limit, limit, out=y)
    data = _e4m3_bits(y) if codec is Codec.FP8_E4M3 else _integers(y)
    if codec is Codec.INT4_GROUP8:
        data = (data[..., 0::2] & np.uint8(15)) | (data[..., 1::2] << np.uint8(4))
    data = data.reshape(*rows.shape[:-1], -1)
    return data, scale_bytes.reshape(*rows.shape[:-1], -1)


def decode_rows(codec: Codec, dtype: Dtype, data: Bytes, scales: Bytes) -> Bytes:
    """The inverse of encode_rows as far as there is one.

    data, scales: [..., data_row_bytes] and [..., scale_row_bytes] uint8, C-contiguous.
    returns:      [..., row_bytes] uint8, a new array. Raises as encode_rows.
    """
    elements, group_elements = _check(codec, dtype, data.shape[-1] * (2 if codec is Codec.INT4_GROUP8 else 1))
    grouped = (*data.shape[:-1], elements // group_elements, group_elements)
    scale_dtype = codec.format.scale_dtype(dtype) or dtype
    scale = _widened(scales, scale_dtype).reshape(grouped[:-1])
    magnitude = scale.view(np.uint32) & np.uint32(MAGNITUDE_BITS)
    is_broken = magnitude >= INFINITY_BITS
    scale = np.where(is_broken | (magnitude < ZERO_SCALE_BELOW_BITS), np.float32(0), scale)
    y = _values(codec, data).reshape(grouped)
    largest = _float_of(FLOAT_TYPES[dtype].largest_bits)
    with np.errstate(over="ignore"):
        y *= _spread(scale, group_elements)
    np.clip(y, -largest, largest, out=y)
    rows = _narrowed(y, dtype)
    nan_bits = rows.dtype.type(FLOAT_TYPES[dtype].nan_bits)
    if is_broken.any():
        rows[is_broken] = nan_bits
    if codec is Codec.FP8_E4M3:
        rows[(data & np.uint8(127) == 127).reshape(grouped)] = nan_bits
    return rows.reshape(*data.shape[:-1], -1).view(np.uint8)


def error_bound(codec: Codec, dtype: Dtype, largest: Doubles) -> Doubles:
    """Largest possible |decoded - x| in groups whose largest |x| is `largest`. Same shape; see the module's table."""
    kind, limit = FLOAT_TYPES[dtype], LIMITS[codec]
    scale_step = kind.smallest_step if codec.format.scale_dtype(dtype) is dtype else 0.0
    scale = largest / limit * (1 + kind.unit_roundoff) + scale_step / 2
    rounding = 1 + 2.0**-20  # of the few float32 steps in between
    quantized = scale * _STEPS[codec] / 2 * rounding + limit * scale_step / 2
    return quantized + kind.unit_roundoff * (largest + quantized) + kind.smallest_step / 2 + 2.0**-100


def rms_error_bound(codec: Codec, dtype: Dtype, largest: Doubles) -> float:
    """What the root of the mean squared error stays under where fractions of a step are equally likely: the second
    column of the module's table over all groups; largest as for error_bound."""
    kind, step = FLOAT_TYPES[dtype], _STEPS[codec] / LIMITS[codec]
    per_group = step**2 / 12 + kind.unit_roundoff**2 / 3
    floor = kind.smallest_step * LIMITS[codec]
    return float(1.05 * np.sqrt(per_group * np.mean(np.square(largest))) + floor + 2.0**-100)


def _check(codec: Codec, dtype: Dtype, elements: int) -> tuple[int, int]:
    """(elements of a row, elements of a scale group)."""
    if codec not in LIMITS:
        raise InvalidRequest(f"codec {codec.name} does not change rows: copy them")
    codec.format.check_dtype(dtype)
    codec.format.scale_row_bytes(elements, dtype)
    return elements, codec.format.scale_group_elements(elements)


def _largest(magnitudes: Bits) -> Bits:
    """[..., groups, elements] to [..., groups]. Column by column: numpy's own loop over 8 elements takes far longer."""
    if magnitudes.shape[-1] > 16:
        return np.asarray(magnitudes.max(axis=-1))
    largest = magnitudes[..., 0].copy()
    for column in range(1, magnitudes.shape[-1]):
        np.maximum(largest, magnitudes[..., column], out=largest)
    return largest


def _spread(of_groups: Floats, group_elements: int) -> Floats:
    """[..., groups] repeated to [..., groups, elements]: broadcasting would loop over 8 elements at a time."""
    return np.repeat(of_groups, group_elements).reshape(*of_groups.shape, group_elements)


def _scales(codec: Codec, dtype: Dtype, largest: Bits) -> tuple[Bytes, Floats, npt.NDArray[np.bool_]]:
    """(stored scales as bytes, 1 / scale, whether the group is neither zeros nor broken) of largest magnitudes."""
    scale_dtype = codec.format.scale_dtype(dtype) or dtype
    finite = np.minimum(largest, np.uint32(FLOAT_TYPES[dtype].largest_bits)).view(np.float32)
    stored = _narrowed(finite / np.float32(LIMITS[codec]), scale_dtype)
    is_broken = largest > INFINITY_BITS
    is_live = (largest >= ZERO_BELOW_BITS) & (stored != 0) & ~is_broken
    bits = stored.dtype.type
    stored = np.where(is_live, stored, np.where(is_broken, bits(FLOAT_TYPES[scale_dtype].nan_bits), bits(0)))
    scale = _widened(stored.view(np.uint8), scale_dtype).reshape(largest.shape)
    inverses: Floats = np.divide(np.float32(1), np.where(is_live, scale, np.float32(1)), dtype=np.float32)
    return stored.view(np.uint8), inverses, is_live


def _integers(y: Floats) -> Bytes:
    """Nearest even integers in [-128, 127] as two's complement bytes: the low ones of the sum's bit pattern."""
    sums: Floats = y + _INTEGER_MAGIC
    return sums.view(np.uint32).astype(np.uint8)


def _e4m3_bits(y: Floats) -> Bytes:
    """[...] float32 in [-448, 448] as e4m3."""
    bits = y.view(np.uint32)
    magnitude = bits & np.uint32(MAGNITUDE_BITS)
    rounded = (magnitude + np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    subnormal = (magnitude.view(np.float32) + _SUBNORMAL_MAGIC).view(np.uint32) - _SUBNORMAL_MAGIC.view(np.uint32)
    is_normal = magnitude >= _SMALLEST_NORMAL_BITS
    code: Bits = np.where(is_normal, rounded - np.uint32((127 - 7) << 3), subnormal)
    return (code | (bits >> np.uint32(24) & np.uint32(128))).astype(np.uint8)


def _values(codec: Codec, data: Bytes) -> Floats:
    """What stored elements stand for, before their scale."""
    if codec is Codec.FP8_E4M3:
        return _E4M3_VALUES[data]
    if codec is Codec.INT8_GROUP8:
        return data.view(np.int8).astype(np.float32)
    nibbles = np.stack((data & np.uint8(15), data >> np.uint8(4)), axis=-1)
    return ((nibbles ^ np.uint8(8)).astype(np.int8) - np.int8(8)).astype(np.float32)


def _widened(raw: Bytes, dtype: Dtype) -> Floats:
    """Elements as float32, exactly. raw: [..., n] uint8, C-contiguous."""
    if dtype is Dtype.FP16:
        return raw.view(np.float16).astype(np.float32)
    if dtype is Dtype.BF16:
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(np.float32)


def _narrowed(y: Floats, dtype: Dtype) -> npt.NDArray[Any]:
    """Finite float32 rounded to nearest even, as bit patterns."""
    if dtype is Dtype.FP16:
        return y.astype(np.float16).view(np.uint16)
    bits = y.view(np.uint32)
    if dtype is Dtype.BF16:
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
    return bits


def _float_of(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def _e4m3_values() -> Floats:
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    magnitudes = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10))
    magnitudes[codes & 127 == 127] = np.nan
    return np.where(codes < 128, magnitudes, -magnitudes).astype(np.float32)


_E4M3_VALUES = _e4m3_values()
