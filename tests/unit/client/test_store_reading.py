"""How many pages a thread copies at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpool.client.store_reading import CopyThreads

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("waiting", "page_bytes", "together"),
    [
        (1, 4 * KIB, 1),
        (3, 4 * KIB, 1),  # one for each of three threads
        (8, 4 * KIB, 2),
        (1000, 4 * KIB, 8),
        (1000, 512 * KIB, 4),
        (1000, 8 * MIB, 1),  # a batch of them would be copied by one thread while the others have nothing to do
    ],
)
def test_small_pages_are_handed_over_together_and_large_ones_alone(
    waiting: int, page_bytes: int, together: int
) -> None:
    with ThreadPoolExecutor(1) as executor:
        assert CopyThreads(executor, 4).copied_together(waiting, page_bytes) == together
