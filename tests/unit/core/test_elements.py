import pytest

from kvpool.core.elements import CODEC_FORMATS, FLOAT_DTYPES, Codec, Dtype, codec_from_id
from kvpool.core.errors import InvalidRequest


def test_every_dtype_has_a_size_and_every_codec_a_format() -> None:
    assert {dtype.name: dtype.bits for dtype in Dtype} == {
        "BF16": 16, "FP16": 16, "FP32": 32, "INT8": 8, "FP8_E4M3": 8, "FP8_E5M2": 8, "INT4": 4,
    }  # fmt: skip
    assert set(CODEC_FORMATS) == set(Codec)
    assert [codec for codec in Codec if codec.format.lossless] == [Codec.RAW]


def test_codecs_by_number() -> None:
    assert [codec_from_id(number) for number in (1, 2, 3, 4)] == list(Codec)
    assert [codec.codec_id for codec in Codec] == [1, 2, 3, 4]
    for number in (0, 5, 255):
        with pytest.raises(InvalidRequest, match=f"codec {number} is unknown; this version knows 1 RAW"):
            codec_from_id(number)


def test_rows_of_scales() -> None:
    assert Codec.RAW.format.scale_row_bytes(13, Dtype.BF16) == 0
    assert Codec.FP8_E4M3.format.scale_row_bytes(13, Dtype.BF16) == 4
    with pytest.raises(InvalidRequest, match="scale group of 8"):
        Codec.INT4_GROUP8.format.scale_row_bytes(12, Dtype.BF16)
    assert Codec.RAW.format.data_row_bits(10, Dtype.FP32) == 320
    assert Codec.INT4_GROUP8.format.data_row_bits(10, Dtype.FP32) == 40


def test_scales_of_groups_have_the_engines_own_type() -> None:
    for dtype in FLOAT_DTYPES:
        for codec in (Codec.INT8_GROUP8, Codec.INT4_GROUP8):
            assert codec.format.scale_dtype(dtype) is dtype
            assert codec.format.scale_row_bytes(128, dtype) == 16 * dtype.bits // 8
        assert Codec.FP8_E4M3.format.scale_dtype(dtype) is Dtype.FP32
        assert Codec.RAW.format.scale_dtype(dtype) is None


def test_only_floats_can_be_quantized() -> None:
    for dtype in Dtype:
        Codec.RAW.format.check_dtype(dtype)
        for codec in set(Codec) - {Codec.RAW}:
            if dtype in FLOAT_DTYPES:
                codec.format.check_dtype(dtype)
            else:
                with pytest.raises(InvalidRequest, match=f"BF16, FP16, FP32 elements .* not {dtype.name}; use RAW"):
                    codec.format.check_dtype(dtype)
