"""Mappings of a peer's cache end together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from kvpool.core.errors import Stopped
from kvpool_gpuagent.adapters.gpu.peers import PeerMemory


def test_a_mapping_that_cannot_be_undone_keeps_no_other() -> None:
    undone: list[int] = []

    def open_at(ordinal: int) -> tuple[list[int], Callable[[], None]]:
        def undo() -> None:
            undone.append(ordinal)
            if ordinal == 1:
                raise RuntimeError("cuIpcCloseMemHandle failed")

        return [ordinal << 20], undo

    memory = PeerMemory(cast(Any, None), cast(Any, None), 0, open_at)
    assert [memory.addresses(ordinal) for ordinal in (0, 1, 2, 1)] == [[0], [1 << 20], [2 << 20], [1 << 20]]
    with pytest.raises(RuntimeError):
        memory.unmap()
    assert sorted(undone) == [0, 1, 2]
    memory.unmap()
    assert len(undone) == 3


def test_memory_that_was_unmapped_is_not_mapped_again() -> None:
    opened: list[int] = []

    def open_at(ordinal: int) -> tuple[list[int], Callable[[], None]]:
        opened.append(ordinal)
        return [ordinal << 20], lambda: opened.remove(ordinal)

    memory = PeerMemory(cast(Any, None), cast(Any, None), 0, open_at)
    memory.addresses(0)
    memory.unmap()
    for ordinal in (0, 1):
        with pytest.raises(Stopped):
            memory.addresses(ordinal)
    assert opened == []
