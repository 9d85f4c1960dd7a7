"""The mark that transfers are measured against."""

from kvpool_gpuagent.adapters.link_speed import cpu_link


def test_a_copy_on_the_cpu_has_a_speed() -> None:
    (direction, bytes_per_s), *rest = cpu_link().items()
    assert (direction, rest) == ("copy", [])
    assert 1e8 < bytes_per_s < 1e13
