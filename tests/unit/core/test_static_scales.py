import numpy as np
import numpy.typing as npt
import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.core.keyspace import Dtype, KeyspaceSpec, KvGroup, encode_keyspace, keyspace_id
from kvpool.core.static_scales import static_scales_salt

GROUP = KvGroup(2, 4, 16)
SCALES = np.linspace(0.5, 2, 8, dtype=np.float32).reshape(2, 4)


def test_other_scales_are_another_keyspace() -> None:
    salts = [
        static_scales_salt(GROUP, SCALES, 1.0),
        static_scales_salt(GROUP, 1.0, SCALES),
        static_scales_salt(GROUP, SCALES, SCALES),
        static_scales_salt(GROUP, SCALES[:, ::-1], 1.0),
        static_scales_salt(GROUP, 1.0, 1.0),
        static_scales_salt(GROUP, 1.0, 0.5),
        static_scales_salt(GROUP, 1.0, 1.0, salt=b"lora"),
        static_scales_salt(KvGroup(4, 2, 16), 1.0, 1.0),
        static_scales_salt(KvGroup.mla(2, 16), 1.0),
    ]
    assert {len(salt) for salt in salts} == {32}
    specs = [KeyspaceSpec("m", "r", (GROUP,), Dtype.FP8_E4M3, salt=salt) for salt in salts]
    assert len({keyspace_id(encode_keyspace("t", spec)) for spec in specs}) == len(salts)


def test_equal_scales_are_equal_however_they_are_given() -> None:
    per_layer = np.array([[0.5], [2.0]])
    salt = static_scales_salt(GROUP, per_layer, 0.25)
    assert salt == static_scales_salt(GROUP, per_layer.repeat(4, axis=1).astype(np.float32), np.full((2, 4), 0.25))
    assert salt == static_scales_salt(GROUP, per_layer.astype(">f4"), np.float16(0.25))
    assert static_scales_salt(GROUP, 0.1, 1.0) == static_scales_salt(GROUP, np.float32(0.1), 1.0)
    # Stable across versions: the bytes are part of what keyspaces are.
    assert static_scales_salt(GROUP, 1.0, 1.0).hex() == (
        "5f818629f477513fbdbdc7cb5a8f426029b2b4d72107176858a244051fdd1d0d"
    )


@pytest.mark.parametrize(
    "scales, words",
    [
        ((1.0,), "scales must be 2, one for each"),
        ((1.0, SCALES[0]), r"scales\[1\] must be a number, \[layers, 1\] or \(2, 4\), got \(4,\)"),
        ((SCALES[:, :2], 1.0), r"scales\[0\] must be a number"),
        ((1.0, 0.0), r"scales\[1\] must be positive float32"),
        ((1.0, -1.0), r"scales\[1\] must be positive float32"),
        ((float("nan"), 1.0), r"scales\[0\] must be positive float32"),
        ((1.0, 1e39), r"scales\[1\] must be positive float32"),
        ((1.0, 1e-60), r"scales\[1\] must be positive float32"),
    ],
)
def test_bad_scales_are_refused(scales: tuple[npt.ArrayLike, ...], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        static_scales_salt(GROUP, *scales)
