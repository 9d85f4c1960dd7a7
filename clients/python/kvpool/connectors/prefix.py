"""A prefix that an engine found, of which the last chunks may still be on their way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvpool.client.engine_items import LoadResult
from kvpool.client.sync import Handle
from kvpool.core.errors import KvPoolError

_log = logging.getLogger(__name__)


class Prefix:
    """Leading chunks of a prompt: the engine's own, and those that are being loaded. Belongs to one thread.

    Its blocks are pinned until `PrefixCache.release`, which takes a finished one.
    """

    def __init__(
        self,
        own_blocks: Sequence[int] = (),
        *,
        load: Handle[LoadResult] | None = None,
        blocks: Sequence[int] = (),
        bind: Callable[[LoadResult], Sequence[int]] = lambda loaded: (),
        match_ms: float = 0.0,
        failure: str = "",
    ) -> None:
        """blocks: that are loaded into. bind(loaded): so many leading ones of them hold their chunks now, the others
        are given back; returns where the chunks are, pinned. failure: why the pool could not help."""
        self.own_chunks = len(own_blocks)
        self.blocks = (*own_blocks, *blocks)  # of all chunks that may come; of those that came, once it is finished
        self.loaded = LoadResult()
        self.failure = failure  # or why it could not help to the end
        self.match_ms, self.load_ms = match_ms, 0.0  # load_ms: until the last layer was in
        self.waited_ms = 0.0  # so far, for layers
        self._own_blocks, self._load, self._bind = tuple(own_blocks), load, bind
        self._started_s = time.perf_counter()

    @property
    def finished(self) -> bool:
        """Whether `finish` has nothing to wait for."""
        return self._load is None

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
            self.load_ms = (ended_s - self._started_s) * 1e3
            self.waited_ms += (ended_s - started_s) * 1e3

    def finish(self) -> Prefix:
        """Wait for the end: `blocks` are those of the chunks that are in. May be called again."""
        load, self._load = self._load, None
        if load is None:
            return self
        self.blocks = self._own_blocks  # should the wait be interrupted
        try:
            self.loaded = load.result()
            self.failure = str(self.loaded.error) if self.loaded.error is not None else ""
        except KvPoolError as error:
            self.failure = str(error)
        finally:  # also of a wait that was interrupted: the blocks are reused once they are released
            self.blocks = (*self._own_blocks, *self._bind(self.loaded))
        if self.failure:
            _log.warning("kvpool: computing instead of loading: %s", self.failure)
        self.load_ms = self.load_ms or (time.perf_counter() - self._started_s) * 1e3
        return self
