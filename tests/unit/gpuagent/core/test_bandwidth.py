"""Measured bandwidths."""

import pytest

from kvpool_gpuagent.core.sources import Bandwidths, LoadSource


def test_nothing_measured_is_nothing_estimated() -> None:
    bandwidths = Bandwidths()
    assert bandwidths.bytes_per_s(LoadSource.DISK) == 0.0
    assert bandwidths.estimate_ms(LoadSource.DISK, 1 << 30) == 0.0


def test_sources_are_measured_apart() -> None:
    bandwidths = Bandwidths()
    bandwidths.record(LoadSource.STAGING, 4000, 2.0)
    bandwidths.record(LoadSource.REMOTE, 1000, 2.0)
    assert bandwidths.bytes_per_s(LoadSource.STAGING) == 2000
    assert bandwidths.estimate_ms(LoadSource.REMOTE, 250) == 500


@pytest.mark.parametrize("sample", [(0, 1.0), (-5, 1.0), (5, 0.0), (5, -1.0)])
def test_nonsense_is_ignored(sample: tuple[int, float]) -> None:
    bandwidths = Bandwidths()
    bandwidths.record(LoadSource.DISK, *sample)
    assert bandwidths.bytes_per_s(LoadSource.DISK) == 0.0


def test_a_large_load_outvotes_tiny_ones_before_it() -> None:
    bandwidths = Bandwidths(half_life_bytes=1 << 20)
    for _ in range(20):
        bandwidths.record(LoadSource.STAGING, 1000, 0.01)  # 100 KB/s: all latency
    bandwidths.record(LoadSource.STAGING, 16 << 20, 0.004)
    assert bandwidths.bytes_per_s(LoadSource.STAGING) == pytest.approx((16 << 20) / 0.004, rel=0.01)


def test_what_is_long_ago_fades() -> None:
    bandwidths = Bandwidths(half_life_bytes=1000)
    bandwidths.record(LoadSource.DISK, 1000, 1.0)
    for _ in range(20):
        bandwidths.record(LoadSource.DISK, 1000, 2.0)
    assert bandwidths.bytes_per_s(LoadSource.DISK) == pytest.approx(500, rel=0.01)
