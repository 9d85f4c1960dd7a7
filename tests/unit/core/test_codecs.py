"""Codecs against float64: stated errors hold, values are the nearest, and what is not finite is distinguished."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.core import codecs
from kvpool.core.codecs import decode_rows, encode_rows, error_bound, rms_error_bound
from kvpool.core.elements import FLOAT_DTYPES, Codec, Dtype
from kvpool.core.errors import InvalidRequest
from tests.unit.core.vectors import load_vectors

Bytes = npt.NDArray[np.uint8]
Doubles = npt.NDArray[np.float64]
LOSSY = [codec for codec in Codec if codec is not Codec.RAW]
TORCH = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}
STORAGE = {Dtype.BF16: np.uint16, Dtype.FP16: np.uint16, Dtype.FP32: np.uint32}
LARGEST = {dtype: torch.finfo(TORCH[dtype]).max for dtype in FLOAT_DTYPES}
ROW = 64
every = pytest.mark.parametrize("codec", LOSSY)
any_float = pytest.mark.parametrize("dtype", FLOAT_DTYPES)


def rows_of(values: Doubles, dtype: Dtype) -> Bytes:
    """[n, ROW] as elements of the type, by torch's casts."""
    return torch.from_numpy(values).clamp(-LARGEST[dtype], LARGEST[dtype]).to(TORCH[dtype]).view(torch.uint8).numpy()


def doubles(raw: Bytes, dtype: Dtype) -> Doubles:
    values: Doubles = torch.from_numpy(raw).view(TORCH[dtype]).double().numpy()
    return values


def largest_of(codec: Codec, values: Doubles) -> Doubles:
    """[n, groups, 1] largest magnitudes."""
    grouped = np.abs(values).reshape(len(values), -1, codec.format.scale_group_elements(ROW))
    return np.asarray(grouped.max(axis=-1, keepdims=True))


def check_errors(codec: Codec, dtype: Dtype, rows: Bytes) -> tuple[float, float]:
    """Every element within its bound. Returns (RMS error, RMS of the elements)."""
    values = doubles(rows, dtype)
    data, scales = encode_rows(codec, dtype, rows)
    assert data.shape == (len(rows), codec.format.data_row_bits(ROW, dtype) // 8)
    assert scales.shape == (len(rows), codec.format.scale_row_bytes(ROW, dtype))
    errors = doubles(decode_rows(codec, dtype, data, scales), dtype) - values
    largest = largest_of(codec, values)
    bounds = error_bound(codec, dtype, largest)
    assert (np.abs(errors).reshape(*largest.shape[:2], -1) <= bounds).all()
    return float(np.sqrt(np.mean(errors**2))), float(np.sqrt(np.mean(values**2)))


def with_outliers(random: np.random.Generator) -> Doubles:
    values = random.standard_normal((64, ROW))
    values[:, ::13] *= 80
    return values


SMOOTH: dict[str, Callable[[np.random.Generator], Doubles]] = {
    "normal": lambda random: random.standard_normal((128, ROW)),
    "channels of a key": lambda random: random.standard_normal((128, ROW)) * np.geomspace(0.05, 20, ROW) + 0.3,
    "outliers": with_outliers,
    "huge": lambda random: random.standard_normal((64, ROW)) * 1e4,
}


@every
@any_float
@pytest.mark.parametrize("name", SMOOTH)
def test_stated_errors_hold_for_what_caches_hold(codec: Codec, dtype: Dtype, name: str) -> None:
    rows = rows_of(SMOOTH[name](np.random.default_rng(5)), dtype)
    rms_error, _ = check_errors(codec, dtype, rows)
    assert 0 < rms_error <= rms_error_bound(codec, dtype, largest_of(codec, doubles(rows, dtype)))


@pytest.mark.parametrize(
    ("codec", "relative"), [(Codec.INT8_GROUP8, 0.0048), (Codec.FP8_E4M3, 0.027), (Codec.INT4_GROUP8, 0.083)]
)
def test_relative_errors_of_normal_elements(codec: Codec, relative: float) -> None:
    rms_error, rms = check_errors(
        codec, Dtype.BF16, rows_of(np.random.default_rng(6).standard_normal((512, ROW)), Dtype.BF16)
    )
    assert 0.8 * relative < rms_error / rms < relative


@every
@any_float
@pytest.mark.parametrize("exponent", [-45, -38, -31, -30, -29, -8, -6, -4, 4, 30, 37, 38])
def test_stated_errors_hold_at_the_ends_of_the_range(codec: Codec, dtype: Dtype, exponent: int) -> None:
    values = np.random.default_rng(7).uniform(-1, 1, (32, ROW)) * 10.0**exponent
    values[::4, ::8] = LARGEST[dtype] if exponent > 0 else 0
    check_errors(codec, dtype, rows_of(values, dtype))


@every
@any_float
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.integers(0, 60), data=st.data())
@pytest.mark.slow
def test_stated_errors_hold_for_any_finite_elements(
    codec: Codec, dtype: Dtype, seed: int, spread: int, data: st.DataObject
) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal((8, ROW)) * 2.0 ** random.integers(-spread, spread + 1, (8, ROW))
    special = data.draw(st.lists(st.floats(width=16, allow_nan=False, allow_infinity=False), max_size=16))
    values.flat[random.integers(0, values.size, len(special))] = special
    check_errors(codec, dtype, rows_of(values, dtype))


@any_float
@pytest.mark.parametrize(("codec", "limit"), [(Codec.INT8_GROUP8, 127), (Codec.INT4_GROUP8, 7)])
def test_integers_are_the_nearest_to_what_the_stored_scale_says(codec: Codec, dtype: Dtype, limit: int) -> None:
    rows = rows_of(np.random.default_rng(8).standard_normal((64, ROW)), dtype)
    data, scales = encode_rows(codec, dtype, rows)
    if codec is Codec.INT4_GROUP8:
        data = np.stack((data & 15, data >> 4), axis=-1).reshape(64, ROW)  # low nibble first
        data = np.where(data > 7, data.astype(np.int16) - 16, data)
    integers = data.astype(np.int8).astype(np.float64).reshape(64, -1, 8)
    scale = doubles(scales, dtype).reshape(64, -1, 1)
    exact = doubles(rows, dtype).reshape(64, -1, 8) / scale
    assert np.abs(np.clip(exact, -limit, limit) - integers).max() <= 0.5 + 1e-4
    assert np.abs(integers).max() == limit
    largest = largest_of(codec, doubles(rows, dtype))
    assert np.array_equal(
        scales, torch.from_numpy((largest / limit)[..., 0]).to(TORCH[dtype]).view(torch.uint8).numpy()
    )


def test_e4m3_rounds_as_torch_does() -> None:
    edges = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    edges = torch.from_numpy(np.unique(edges[edges.isfinite()].numpy()))
    middles = (edges[1:] + edges[:-1]) / 2
    around = torch.cat((edges, middles, middles.nextafter(edges[1:]), middles.nextafter(edges[:-1])))
    values = torch.cat((around, torch.tensor([0.0, -0.0, 1e-30, -1e-30])))
    ours = codecs._e4m3_bits(values.numpy())
    assert np.array_equal(ours, values.to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(codecs._values(Codec.FP8_E4M3, codes.numpy()), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
def test_elements_are_rounded_as_torch_does(dtype: Dtype) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(TORCH[dtype]).float()
    halves = torch.from_numpy(np.unique(halves[halves.isfinite()].numpy()))
    middles = (halves[1:] + halves[:-1]) / 2
    values = torch.cat((halves, middles, middles.nextafter(halves[1:]), middles.nextafter(halves[:-1])))
    expected = values.to(TORCH[dtype]).view(torch.uint16).numpy()
    assert np.array_equal(codecs._narrowed(values.numpy(), dtype), expected)


def test_bytes_by_hand() -> None:
    """One group of 8 bf16 elements; nothing here comes from the code."""
    values = np.array([[7, -7, 1, 2, -3, 0.5, 1.5, 0]], dtype=np.float64)
    rows = rows_of(values, Dtype.BF16)
    data, scales = encode_rows(Codec.INT4_GROUP8, Dtype.BF16, rows)
    assert scales.tobytes().hex() == "803f"  # 1.0, little endian
    assert data.tobytes().hex() == "97" + "21" + "0d" + "02"  # 7 -7 | 1 2 | -3, 0.5 to even | 1.5 to even, 0
    assert np.array_equal(
        doubles(decode_rows(Codec.INT4_GROUP8, Dtype.BF16, data, scales), Dtype.BF16), [[7, -7, 1, 2, -3, 0, 2, 0]]
    )
    data, scales = encode_rows(Codec.INT8_GROUP8, Dtype.FP16, rows_of(values * 127 / 7 / 8, Dtype.FP16))
    assert scales.tobytes().hex() == "0030"  # 0.125
    assert data.view(np.int8).tolist() == [[127, -127, 18, 36, -54, 9, 27, 0]]
    data, scales = encode_rows(Codec.FP8_E4M3, Dtype.FP32, rows_of(values * 64, Dtype.FP32))
    assert scales.tobytes().hex() == "0000803f"
    assert data.tobytes().hex() == "7e" + "fe" + "68" + "70" + "f4" + "60" + "6c" + "00"


@pytest.mark.parametrize(
    "vector", load_vectors("codec_vectors.json"), ids=lambda each: f"{each['codec']}-{each['dtype']}"
)
def test_published_vectors(vector: dict[str, Any]) -> None:
    codec, dtype = Codec(vector["codec"]), Dtype(vector["dtype"])
    rows, data, scales, decoded = (
        np.frombuffer(bytes.fromhex("".join(vector[name])), dtype=np.uint8).reshape(len(vector[name]), -1)
        for name in ("rows", "data", "scales", "decoded")
    )
    ours = encode_rows(codec, dtype, rows)
    assert np.array_equal(ours[0], data) and np.array_equal(ours[1], scales)
    assert np.array_equal(decode_rows(codec, dtype, data, scales), decoded)


@every
@any_float
def test_a_nan_stays_visible_in_its_group_and_an_infinity_saturates(codec: Codec, dtype: Dtype) -> None:
    values = np.random.default_rng(9).standard_normal((3, ROW))
    clean = rows_of(values, dtype)
    rows = torch.from_numpy(clean.copy()).view(TORCH[dtype])
    rows[1, 9] = torch.nan
    rows[2, 9], rows[2, 10] = torch.inf, -torch.inf
    data, scales = encode_rows(codec, dtype, rows.view(torch.uint8).numpy())
    decoded = decode_rows(codec, dtype, data, scales)
    group = slice(8, 16) if codec.format.scale_group_elements(ROW) == 8 else slice(0, ROW)
    expected = decode_rows(codec, dtype, *encode_rows(codec, dtype, clean)).view(STORAGE[dtype])
    expected[1, group] = codecs.FLOAT_TYPES[dtype].nan_bits
    assert np.array_equal(decoded.view(STORAGE[dtype])[:2], expected[:2])
    saturated = doubles(decoded, dtype)[2]
    assert np.isfinite(saturated).all()
    assert 0.99 * LARGEST[dtype] <= saturated[9] <= LARGEST[dtype] and saturated[10] == -saturated[9]


@every
@any_float
def test_scales_that_no_encoder_writes(codec: Codec, dtype: Dtype) -> None:
    ones = rows_of(np.ones((1, ROW)), dtype)
    data, scales = encode_rows(codec, dtype, ones)
    stored = codec.format.scale_dtype(dtype)
    assert stored is not None
    for value, expected in ((torch.nan, torch.nan), (torch.inf, torch.nan), (2.0**-111, 0.0)):
        foreign = torch.from_numpy(scales.copy()).view(TORCH[stored]).fill_(value).view(torch.uint8).numpy()
        decoded = doubles(decode_rows(codec, dtype, data, foreign), dtype)
        assert np.array_equal(decoded, np.full_like(decoded, expected), equal_nan=True)


@any_float
def test_e4m3_nans_of_an_engine_are_nans(dtype: Dtype) -> None:
    data, scales = encode_rows(Codec.FP8_E4M3, dtype, rows_of(np.ones((1, ROW)), dtype))
    data[0, 3], data[0, 5] = 0x7F, 0xFF
    decoded = doubles(decode_rows(Codec.FP8_E4M3, dtype, data, scales), dtype)
    assert np.flatnonzero(np.isnan(decoded)).tolist() == [3, 5]


@every
@any_float
def test_zeros_are_stored_as_zeros(codec: Codec, dtype: Dtype) -> None:
    data, scales = encode_rows(codec, dtype, rows_of(np.full((2, ROW), -0.0), dtype))
    assert not data.any() and not scales.any()


@any_float
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_bytes_are_taken(dtype: Dtype, seed: int) -> None:
    """No bit pattern of elements, data or scales raises or warns."""
    random = np.random.default_rng(seed)
    for codec in LOSSY:
        data, scales = encode_rows(codec, dtype, random.integers(0, 256, (4, ROW * dtype.bits // 8), dtype=np.uint8))
        assert np.array_equal(encode_rows(codec, dtype, decode_rows(codec, dtype, data, scales))[1] == 0, scales == 0)
        noise = [random.integers(0, 256, part.shape, dtype=np.uint8) for part in (data, scales)]
        assert decode_rows(codec, dtype, *noise).shape == (4, ROW * dtype.bits // 8)


def test_what_cannot_be_quantized_is_refused() -> None:
    row = np.zeros((1, 24), dtype=np.uint8)
    with pytest.raises(InvalidRequest, match="RAW does not change rows"):
        encode_rows(Codec.RAW, Dtype.BF16, row)
    with pytest.raises(InvalidRequest, match="not INT8"):
        encode_rows(Codec.FP8_E4M3, Dtype.INT8, row)
    with pytest.raises(InvalidRequest, match="scale group of 8"):
        encode_rows(Codec.INT8_GROUP8, Dtype.BF16, row)
