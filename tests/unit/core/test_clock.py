import time

from kvpool.core.clock import SystemClock


def test_the_clocks_are_those_of_the_machine() -> None:
    clock = SystemClock()
    before = time.monotonic(), time.time_ns() // 1000
    now = clock.monotonic_s(), clock.wall_us()
    after = time.monotonic(), time.time_ns() // 1000
    assert before[0] <= now[0] <= after[0]
    assert before[1] <= now[1] <= after[1]
