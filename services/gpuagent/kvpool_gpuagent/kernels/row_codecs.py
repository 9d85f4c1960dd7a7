"""Arithmetic of the codecs that are not lossless, as kernels do it, and where a tile's scale groups lie.

`kvpool.core.codecs` specifies every step; bytes here are equal to its bytes, on a GPU and in the interpreter. Casts to
bf16 and e4m3 are spelled out in integers, because the interpreter's own truncate. A clamp stands between each product
and the next sum, so the compiler has nothing to contract.
"""

import triton
import triton.language as tl

from kvpool_gpuagent.kernels.codec_shapes import RowCodec
from kvpool_gpuagent.kernels.tables import PlaneColumn

_ADDRESS = tl.constexpr(PlaneColumn.ADDRESS.value)
_BLOCK_STRIDE = tl.constexpr(PlaneColumn.BLOCK_STRIDE.value)
_TOKEN_STRIDE = tl.constexpr(PlaneColumn.TOKEN_STRIDE.value)
_HEAD_STRIDE = tl.constexpr(PlaneColumn.HEAD_STRIDE.value)
_PAYLOAD_UNIT_STRIDE = tl.constexpr(PlaneColumn.PAYLOAD_UNIT_STRIDE.value)

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_ZERO_BELOW = tl.constexpr((127 - 100) << 23)  # 2**-100
_ZERO_SCALE_BELOW = tl.constexpr((127 - 110) << 23)  # 2**-110
_INTEGER_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23
_SUBNORMAL_MAGIC = tl.constexpr(16384.0)
_SUBNORMAL_MAGIC_BITS = tl.constexpr((127 + 14) << 23)
_SMALLEST_NORMAL = tl.constexpr((127 - 6) << 23)  # 2**-6
_FP8 = tl.constexpr(RowCodec.FP8_E4M3.value)
_INT8 = tl.constexpr(RowCodec.INT8_GROUP8.value)
_INT4 = tl.constexpr(RowCodec.INT4_GROUP8.value)


@triton.jit
def group_offsets(
    plane: tl.tensor,
    ids: tl.tensor,
    tile: tl.tensor,
    head: tl.tensor,
    POSITIONS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    UNIT_ROWS: tl.constexpr,
    ROW_PLANES: tl.constexpr,
    ROW_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    CODEC: tl.constexpr,
    FLOAT: tl.constexpr,
    TILE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
) -> tl.tuple:
    """For the groups of a tile: offset in elements from the plane's address, number in the payload counted from the
    plane's first group there (int64), position, existence.

    plane: pointer to the plane's row of its table; ids: of the blocks that the tile touches. All results are [TILE].
    """
    BYTES: tl.constexpr = FLOAT.primitive_bitwidth // 8
    GROUP_BYTES: tl.constexpr = GROUP // 2 if CODEC == _INT4 else GROUP  # of data in a payload
    start = tile * TILE
    first_position = start // ROW_GROUPS
    nth_group = start + tl.arange(0, TILE)
    local = nth_group - first_position * ROW_GROUPS
    position = first_position + local // ROW_GROUPS
    block = ids
    if TILE_BLOCKS > 1:
        nth = tl.minimum(position // BLOCK_ROWS - first_position // BLOCK_ROWS, TILE_BLOCKS - 1)
        block = tl.gather(ids, nth, 0)
    offset = block * (tl.load(plane + _BLOCK_STRIDE) // BYTES)
    offset += (position % BLOCK_ROWS).to(tl.int64) * (tl.load(plane + _TOKEN_STRIDE) // BYTES)
    offset += head.to(tl.int64) * (tl.load(plane + _HEAD_STRIDE) // BYTES)
    offset += local % ROW_GROUPS * GROUP
    row = (head.to(tl.int64) * UNIT_ROWS + position % UNIT_ROWS) * ROW_PLANES
    in_payload = row * ROW_GROUPS + local % ROW_GROUPS
    in_payload += (position // UNIT_ROWS).to(tl.int64) * (tl.load(plane + _PAYLOAD_UNIT_STRIDE) // GROUP_BYTES)
    return offset, in_payload, position, nth_group < POSITIONS * ROW_GROUPS


@triton.jit
def lane_pointers(
    address: tl.tensor,
    offset: tl.tensor,
    LANES: tl.constexpr,
    RAW: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
) -> tl.tensor:
    """[TILE, LANES] pointers to elements that begin `offset` elements from an address; both are multiples of a unit."""
    UNIT: tl.constexpr = UNIT_BYTES * 8 // RAW.primitive_bitwidth
    first = tl.multiple_of(address.to(tl.pointer_type(RAW)), UNIT_BYTES)
    offsets = offset[:, None] + tl.arange(0, LANES)[None, :]
    return first + tl.multiple_of(tl.max_contiguous(offsets, [1, LANES]), [1, UNIT if UNIT < LANES else LANES])


@triton.jit
def widen(raw: tl.tensor, FLOAT: tl.constexpr) -> tl.tensor:
    """Bit patterns of elements as float32, exactly."""
    if tl.bfloat16 == FLOAT:
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif tl.float16 == FLOAT:
        x = raw.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        x = raw.to(tl.float32, bitcast=True)
    return x


@triton.jit
def narrow(y: tl.tensor, FLOAT: tl.constexpr) -> tl.tensor:
    """Finite float32 rounded to nearest even, as int16 or int32 bit patterns."""
    if tl.bfloat16 == FLOAT:
        bits = y.to(tl.uint32, bitcast=True)
        raw = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif tl.float16 == FLOAT:
        raw = y.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        raw = y.to(tl.int32, bitcast=True)
    return raw


@triton.jit
def nan_of(like: tl.tensor, FLOAT: tl.constexpr) -> tl.tensor:
    """Bit patterns of quiet NaNs, with shape and type of a tensor."""
    if tl.bfloat16 == FLOAT:
        nan = tl.full(like.shape, 0x7FC0, like.dtype)
    elif tl.float16 == FLOAT:
        nan = tl.full(like.shape, 0x7E00, like.dtype)
    else:
        nan = tl.full(like.shape, 0x7FC00000, like.dtype)
    return nan


@triton.jit
def largest_of(like: tl.tensor, FLOAT: tl.constexpr) -> tl.tensor:
    """Bit patterns, as float32, of a type's largest finite value, in the shape of a tensor."""
    if tl.bfloat16 == FLOAT:
        bits = tl.full(like.shape, 0x7F7F0000, tl.int32)
    elif tl.float16 == FLOAT:
        bits = tl.full(like.shape, 0x477FE000, tl.int32)
    else:
        bits = tl.full(like.shape, 0x7F7FFFFF, tl.int32)
    return bits


@triton.jit
def encode_groups(x: tl.tensor, CODEC: tl.constexpr, FLOAT: tl.constexpr) -> tl.tuple:
    """Codes in the low bits of int32, and scales as bit patterns, [TILE], of float32 elements [TILE, LANES]."""
    LIMIT: tl.constexpr = 448.0 if CODEC == _FP8 else (127.0 if CODEC == _INT8 else 7.0)
    SCALE_FLOAT: tl.constexpr = tl.float32 if CODEC == _FP8 else FLOAT
    largest = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1)
    finite = tl.minimum(largest, largest_of(largest, FLOAT)).to(tl.float32, bitcast=True)
    stored = narrow(tl.math.div_rn(finite, tl.full(finite.shape, LIMIT, tl.float32)), SCALE_FLOAT)
    is_live = (largest >= _ZERO_BELOW) & (largest <= _INFINITY) & (stored != 0)
    of_others = tl.where(largest > _INFINITY, nan_of(stored, SCALE_FLOAT), tl.zeros_like(stored))
    stored = tl.where(is_live, stored, of_others)

    scale = tl.where(is_live, widen(stored, SCALE_FLOAT), 1.0)
    inverse = tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    y = tl.where(is_live[:, None], x, 0.0) * inverse[:, None]
    y = tl.minimum(tl.maximum(y, -LIMIT), LIMIT)
    codes = e4m3_of(y) if CODEC == _FP8 else integers_of(y)
    return codes, stored


@triton.jit
def decode_groups(codes: tl.tensor, stored: tl.tensor, CODEC: tl.constexpr, FLOAT: tl.constexpr) -> tl.tensor:
    """Bit patterns of elements [TILE, LANES], from int32 codes and from bit patterns of scales [TILE]."""
    SCALE_FLOAT: tl.constexpr = tl.float32 if CODEC == _FP8 else FLOAT
    scale = widen(stored, SCALE_FLOAT)
    magnitude = scale.to(tl.int32, bitcast=True) & _MAGNITUDE
    is_broken = magnitude >= _INFINITY
    scale = tl.where(is_broken | (magnitude < _ZERO_SCALE_BELOW), 0.0, scale)
    is_nan = is_broken[:, None]
    if CODEC == _FP8:
        is_nan = is_nan | ((codes & 127) == 127)
        values = e4m3_values(codes)
    else:
        values = codes.to(tl.float32)
    largest = largest_of(codes, FLOAT).to(tl.float32, bitcast=True)
    raw = narrow(tl.minimum(tl.maximum(values * scale[:, None], -largest), largest), FLOAT)
    return tl.where(is_nan, nan_of(raw, FLOAT), raw)


@triton.jit
def integers_of(y: tl.tensor) -> tl.tensor:
    """The nearest even integers, in the low bits of int32."""
    return (y + _INTEGER_MAGIC).to(tl.int32, bitcast=True)


@triton.jit
def e4m3_of(y: tl.tensor) -> tl.tensor:
    """float32 in [-448, 448] as e4m3 codes, in the low bits of int32."""
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    rounded = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    sums = magnitude.to(tl.float32, bitcast=True) + _SUBNORMAL_MAGIC
    subnormal = sums.to(tl.int32, bitcast=True) - _SUBNORMAL_MAGIC_BITS
    return tl.where(magnitude >= _SMALLEST_NORMAL, rounded, subnormal) | ((bits >> 24) & 128)


@triton.jit
def e4m3_values(code: tl.tensor) -> tl.tensor:
    """int32 codes of e4m3 as float32; what 0x7f and 0xff give is not to be used."""
    magnitude = code & 127
    subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # 2**-9
    bits = tl.where(magnitude >= 8, (magnitude << 20) + ((127 - 7) << 23), subnormal)
    # The sign as a bit: a minus would be 0 - x here, and lose that of -0.
    return (bits | ((code & 128) << 24)).to(tl.float32, bitcast=True)
