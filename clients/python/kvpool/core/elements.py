"""Element types and page codecs, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

from kvpool.core.errors import InvalidRequest


class Dtype(IntEnum):
    """Element type of an engine's KV cache. The numbers are those of the wire and of the canonical encoding."""

    BF16 = 1
    FP16 = 2
    FP32 = 3
    INT8 = 4
    FP8_E4M3 = 5
    FP8_E5M2 = 6
    INT4 = 7

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return _DTYPE_BITS[self]


_DTYPE_BITS: Mapping[Dtype, int] = MappingProxyType(
    {
        Dtype.BF16: 16,
        Dtype.FP16: 16,
        Dtype.FP32: 32,
        Dtype.INT8: 8,
        Dtype.FP8_E4M3: 8,
        Dtype.FP8_E5M2: 8,
        Dtype.INT4: 4,
    }
)


class Codec(IntEnum):
    """How page payloads are encoded. The numbers are those of the page header, the wire and the canonical encoding."""

    RAW = 1
    INT8_GROUP8 = 2
    FP8_E4M3 = 3
    INT4_GROUP8 = 4

    @property
    def codec_id(self) -> int:
        return self.value

    @property
    def format(self) -> CodecFormat:
        return CODEC_FORMATS[self]


FLOAT_DTYPES = (Dtype.BF16, Dtype.FP16, Dtype.FP32)
"""What codecs that are not lossless can quantize, and what their scales can be stored as."""

WHOLE_ROW = 0
"""`ScaleFormat.group_elements` when one scale covers all elements of a token's head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFormat:
    """The scales of a codec.

    dtype:          type of a scale; None keeps the engine's own, as engines with such caches do themselves.
    group_elements: consecutive elements of the row that share a scale; WHOLE_ROW = all of them.
    """

    dtype: Dtype | None = None
    group_elements: int = WHOLE_ROW


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecFormat:
    """What a codec does to one row (the elements of one token and head). `codecs` has the arithmetic.

    data_dtype: stored element type; None keeps the engine's own.
    scales:     None when the codec has none.
    """

    lossless: bool
    data_dtype: Dtype | None = None
    scales: ScaleFormat | None = None

    def check_dtype(self, engine_dtype: Dtype) -> None:
        """raises: InvalidRequest for elements that the codec cannot quantize."""
        if not self.lossless and engine_dtype not in FLOAT_DTYPES:
            names = ", ".join(dtype.name for dtype in FLOAT_DTYPES)
            raise InvalidRequest(f"codec: only {names} elements can be quantized, not {engine_dtype.name}; use RAW")

    def scale_dtype(self, engine_dtype: Dtype) -> Dtype | None:
        """Stored type of a scale; None without scales."""
        return None if self.scales is None else self.scales.dtype or engine_dtype

    def scale_group_elements(self, row_elements: int) -> int:
        """Elements that share a scale; 0 without scales."""
        return 0 if self.scales is None else self.scales.group_elements or row_elements

    def data_row_bits(self, row_elements: int, engine_dtype: Dtype) -> int:
        """Bits that one row of `row_elements` takes in the payload's data part."""
        return row_elements * (self.data_dtype or engine_dtype).bits

    def scale_row_bytes(self, row_elements: int, engine_dtype: Dtype) -> int:
        """Bytes that the scales of one row take in the payload's scale part.

        raises: InvalidRequest when the row is no multiple of the scale group.
        """
        scale_dtype = self.scale_dtype(engine_dtype)
        if scale_dtype is None:
            return 0
        group_elements = self.scale_group_elements(row_elements)
        if row_elements % group_elements:
            raise InvalidRequest(
                f"codec: rows of {row_elements} elements are no multiple of its scale group of {group_elements}"
            )
        return row_elements // group_elements * scale_dtype.bits // 8


_GROUP8 = ScaleFormat(group_elements=8)

CODEC_FORMATS: Mapping[Codec, CodecFormat] = MappingProxyType(
    {
        Codec.RAW: CodecFormat(lossless=True),
        Codec.INT8_GROUP8: CodecFormat(lossless=False, data_dtype=Dtype.INT8, scales=_GROUP8),
        Codec.FP8_E4M3: CodecFormat(
            lossless=False, data_dtype=Dtype.FP8_E4M3, scales=ScaleFormat(dtype=Dtype.FP32, group_elements=WHOLE_ROW)
        ),
        Codec.INT4_GROUP8: CodecFormat(lossless=False, data_dtype=Dtype.INT4, scales=_GROUP8),
    }
)


def codec_from_id(codec_id: int) -> Codec:
    """The codec with this number. raises: InvalidRequest for a number this version does not know."""
    try:
        return Codec(codec_id)
    except ValueError:
        known = ", ".join(f"{codec.value} {codec.name}" for codec in Codec)
        raise InvalidRequest(f"codec {codec_id} is unknown; this version knows {known}") from None
