"""Sizes are read alike by services and by the command."""

from __future__ import annotations

import pytest

from kvpool.core.byte_sizes import exact_size_text, size_from_text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        *(("12345", 12345), ("64MiB", 64 << 20), ("1.5GiB", 3 << 29), ("2TiB", 2 << 40), ("10Gi", 10 << 30)),
        *(("512Ki", 1 << 19), ("10GB", 10**10), ("1G", 10**9), ("5 kB", 5000), ("7 B", 7)),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_are_read_with_binary_and_decimal_units(text: str, size_bytes: int) -> None:
    assert size_from_text(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "1gb", "MiB", "ten", "-1", "-1GiB", "infGiB", "nanTiB", "1e9", "1XiB", "1.5", "1.5B"]
)
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write a whole number of bytes, or 64MiB"):
        size_from_text(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0"), (1023, "1023"), (1 << 30, "1GiB"), (1000 << 10, "1000KiB"), (64 << 40, "64TiB")]
)
def test_a_size_is_shown_exactly_and_read_back(size_bytes: int, text: str) -> None:
    assert exact_size_text(size_bytes) == text
    assert size_from_text(text) == size_bytes
