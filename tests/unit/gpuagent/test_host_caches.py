"""GPU caches of the host: which of them are offered, and asked again after a pull that failed."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvpool.core.cancel import CancelToken
from kvpool.core.errors import InvalidRequest, KvPoolError, NotServed, Stopped
from kvpool.testing import eventually
from kvpool_gpuagent.core.cached_chunks import FoundChunks, HeldChunks, PulledChunks, Share, SourceName
from kvpool_gpuagent.engine import host_caches
from kvpool_gpuagent.engine.host_caches import HostCaches

HASHES = bytes(range(32))  # of two chunks
SPAN = cast(Any, SimpleNamespace(chunk_hashes=HASHES))
LAYOUT = SimpleNamespace(layers=[SimpleNamespace(scales=())], layer_range=range(1), head_range=range(1))
RANK = SimpleNamespace(keyspace=b"k" * 16, layout=LAYOUT)
SESSION = cast(Any, SimpleNamespace(rank=RANK, engine_id=b"e", session_id=b"s" * 16))


def held(name: bytes, position: int) -> HeldChunks:
    at = np.array([position])
    found = FoundChunks(at, at.reshape(1, 1), at.reshape(1, 1))
    return HeldChunks(
        source=SourceName(name * 16, "unix:/agent"), layers=range(1), heads=range(1), scales=False, found=found
    )


class Agents:
    """One names the first chunk, the other the second one."""

    async def find(self, keyspace: bytes, chunk_hashes: bytes, engine_id: bytes, timeout_s: float) -> list[HeldChunks]:
        return [held(b"a", 0), held(b"b", 1)]

    async def lease(self, endpoint: str, session_id: bytes, keyspace: bytes, timeout_s: float) -> Any:
        raise AssertionError("pulls lease")

    async def close(self) -> None:
        return None


class Pulls:
    """Fail, with `error`, wherever the second source takes part."""

    def __init__(self, error: KvPoolError) -> None:
        self._error = error

    def is_mapped(self, session: Any, source: SourceName) -> bool:
        return True

    async def pull(self, session: Any, span: Any, shares: Sequence[Share], *_: Any) -> PulledChunks:
        loaded = np.zeros(2, dtype=np.bool_)
        for share in shares:
            if share.held.source.session_id == b"b" * 16:
                raise self._error
            loaded[share.positions] = True
        return PulledChunks(loaded, 1, 0.0)


class Mappings:
    """Map the second source's memory once `may_map`, or fail then."""

    def __init__(self, error: KvPoolError | None = None) -> None:
        self.may_map, self.mapped, self.asked = asyncio.Event(), {b"a" * 16}, 0
        self._error = error

    def is_mapped(self, session: Any, source: SourceName) -> bool:
        return source.session_id in self.mapped

    async def map(self, session: Any, source: SourceName) -> None:
        self.asked += 1
        await self.may_map.wait()
        if self._error is not None:
            raise self._error
        self.mapped.add(source.session_id)


async def test_a_cache_is_not_waited_for_until_it_is_mapped_and_offered_then() -> None:
    pulls = Mappings()
    caches = HostCaches(list, Agents(), cast(Any, pulls))
    for _ in range(3):  # none waits for longer than other agents have for their answers
        assert (await caches.find(SESSION, HASHES)).tolist() == [True, False]
    assert pulls.asked == 1
    pulls.may_map.set()
    await eventually(lambda: len(pulls.mapped) == 2)
    assert (await caches.find(SESSION, HASHES)).tolist() == [True, True]


@pytest.mark.parametrize(
    ("error", "asked"), [(NotServed("no link"), 1), (InvalidRequest("no such GPU"), 1), (Stopped("it has ended"), 3)]
)
async def test_a_cache_that_cannot_be_mapped_is_tried_again_only_if_it_ever_could_be(
    error: KvPoolError, asked: int
) -> None:
    pulls = Mappings(error)
    pulls.may_map.set()
    caches = HostCaches(list, Agents(), cast(Any, pulls))
    for _ in range(3):
        assert (await caches.find(SESSION, HASHES)).tolist() == [True, False]
    assert pulls.asked == asked


@pytest.mark.parametrize("error", [NotServed("no such GPU"), InvalidRequest("no such handle")])
async def test_a_source_out_of_reach_is_left_out_and_no_other(error: KvPoolError) -> None:
    caches = HostCaches(list, Agents(), cast(Any, Pulls(error)))
    assert (await caches.find(SESSION, HASHES)).tolist() == [True, True]
    assert await caches.pull(SESSION, SPAN, CancelToken(), 0.0) is None
    assert (await caches.find(SESSION, HASHES)).tolist() == [True, False]
    pulled = await caches.pull(SESSION, SPAN, CancelToken(), 0.0)
    assert pulled is not None and pulled.loaded.tolist() == [True, False]


async def test_a_source_that_has_ended_is_asked_again() -> None:
    caches = HostCaches(list, Agents(), cast(Any, Pulls(Stopped("the source session has ended"))))
    assert await caches.pull(SESSION, SPAN, CancelToken(), 0.0) is None
    assert (await caches.find(SESSION, HASHES)).tolist() == [True, True]


async def test_answers_that_are_not_used_any_more_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_caches, "REMEMBER_S", 0.0)
    said: list[weakref.ref[Any]] = []

    class Watched(Agents):
        async def find(self, *_: Any) -> list[HeldChunks]:
            answer = held(b"a", 0)
            said.append(weakref.ref(answer.found.generations))
            return [answer]

    caches = HostCaches(list, Watched(), cast(Any, Pulls(Stopped("it has ended"))))
    for number in range(4):
        await caches.find(SESSION, bytes([number]) * 32)
    assert sum(one() is not None for one in said) <= 1
