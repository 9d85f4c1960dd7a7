"""A prefix that an engine found, and one of which the last chunks are still on their way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvpool.connectors.prefix_pool import LoadedChunks, RunningLoad
from kvpool.core.errors import KvPoolError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPrefix:
    """Leading chunks of a prompt that are in the engine's blocks, pinned until `PrefixCache.release`."""

    blocks: tuple[int, ...] = ()
    own_chunks: int = 0
    loaded: LoadedChunks = field(default_factory=LoadedChunks)
    match_ms: float = 0.0
    load_ms: float = 0.0  # until the last layer was in
    failure: str = ""  # why the pool could not help, or not to the end


class RunningPrefix:
    """Own chunks and those that are being loaded, layer by layer. Belongs to one thread."""

    def __init__(
        self,
        own: FoundPrefix,
        load: RunningLoad | None = None,
        blocks: Sequence[int] = (),
        bind: Callable[[LoadedChunks], Sequence[int]] = lambda loaded: (),
    ) -> None:
        """own: all that is there without the load. blocks: that are loaded into. bind(loaded): that many
        leading ones hold their chunks now, the others are given back; returns where the chunks are, pinned."""
        self._own, self._load, self._blocks, self._bind = own, load, tuple(blocks), bind
        self._found = own if load is None else None
        self._started_s = time.perf_counter()
        self._load_ms = 0.0
        self.waited_ms = 0.0  # so far, for layers

    @property
    def blocks(self) -> tuple[int, ...]:
        """Of all chunks that may come. They keep their bytes until `finish`; those that came, as long as pinned."""
        return self._own.blocks + self._blocks

    @property
    def ended(self) -> bool:
        """Whether `finish` has nothing to wait for."""
        return self._found is not None

    def wait_layers(self, layers: int) -> bool:
        """Wait until so many leading layers are in for all chunks. False: not all can be had, see `finish`."""
        if self._load is None:
            return True
        started_s = time.perf_counter()
        try:
            return self._load.wait_layers(layers)
        except KvPoolError:
            return False
        finally:
            ended_s = time.perf_counter()
            self._load_ms = (ended_s - self._started_s) * 1e3
            self.waited_ms += (ended_s - started_s) * 1e3

    def finish(self) -> FoundPrefix:
        """Wait for the end: the chunks that are in. May be called again."""
        if self._found is None:
            self._found = self._own  # should the wait be interrupted
            self._found = self._finish()
        return self._found

    def _finish(self) -> FoundPrefix:
        assert self._load is not None, "else it was found at once"
        loaded, failure = LoadedChunks(), ""
        try:
            loaded = self._load.result()
            failure = loaded.failure
        except KvPoolError as error:
            failure = str(error)
        finally:  # also of a wait that was interrupted: the blocks are reused once they are released
            usable = self._bind(loaded)
        if failure:
            _log.warning("kvpool: computing instead of loading: %s", failure)
        return replace(
            self._own,
            blocks=(*self._own.blocks, *usable),
            loaded=loaded,
            load_ms=self._load_ms or (time.perf_counter() - self._started_s) * 1e3,
            failure=failure,
        )
