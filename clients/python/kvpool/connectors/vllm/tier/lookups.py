"""Which chunks the cluster has, for vLLM's scheduler: asked in two batches a step, answered in a later one.

vLLM stops looking at the first miss of a prefix. So the first chunk that a request asks about is looked up apart: a
prompt that the cluster does not have waits for the answer about one chunk, not for those about all of its chunks. One
that the cluster has is reported together with the request's others: vLLM would load it in a job of its own before them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvpool.connectors.vllm.known_chunks import KnownChunks
from kvpool.connectors.vllm.tier.jobs import ChunkStore

_log = logging.getLogger(f"vllm.{__name__}")
_BATCHES_MAX = 8  # no step asks while so many are on their way; its keys go with those of later steps


@dataclass(slots=True)
class _Pending:
    asked_s: float
    request_ids: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Others:
    """What requests asked about behind their first chunks."""

    request_ids: frozenset[str]
    answer: Future[list[bool]]


@dataclass(slots=True)
class _Batch:
    keys: Sequence[bytes]
    answer: Future[list[bool]]
    others: _Others | None = None
    are_found: bool = False  # all of them: the others are reported already


class TierLookups:
    """Belongs to the scheduler's thread; nothing waits. A verdict holds for its request until that has finished."""

    def __init__(self, known: KnownChunks, timeout_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        """timeout_s: a key that was not found so long after it was first asked for is a miss."""
        self._known, self._timeout_s, self._now_s = known, timeout_s, now_s
        self._verdicts: dict[str, dict[bytes, bool]] = {}
        self._pending: dict[bytes, _Pending] = {}
        self._first: dict[str, bytes] = {}  # by request, of the keys that are not sent yet
        self._unsent: list[bytes] = []  # the others
        self._batches: list[_Batch] = []
        self._answered = False  # one of them, perhaps: vLLM asks for each key again in each step
        self._in_step = False  # so that all keys of a step are judged by the same answers
        self.late_count = 0  # misses because no answer came in time

    def verdict(self, key: bytes, request_id: str) -> bool | None:
        """Whether the cluster has it; None: ask again in a later step."""
        if not self._in_step:
            self._in_step = True
            self._collect()
        verdicts = self._verdicts.setdefault(request_id, {})
        verdict = verdicts.get(key)
        if verdict is not None:
            return verdict
        if key in self._known:
            verdicts[key] = True
            return True
        now_s = self._now_s()
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = _Pending(now_s)
            if self._first.setdefault(request_id, key) is not key:
                self._unsent.append(key)
        elif now_s - pending.asked_s > self._timeout_s:
            verdicts[key] = False
            self.late_count += 1
            return False
        pending.request_ids.add(request_id)
        return None

    def answers(self) -> list[Future[list[bool]]]:
        """Those that are on their way."""
        return [batch.answer for batch in self._batches if not batch.answer.done()]

    def flush(self, store: ChunkStore) -> None:
        """Ask what this step wanted to know, at its end."""
        self._in_step = False
        self._collect()
        if not self._first or len(self._batches) >= _BATCHES_MAX:
            return
        first, rest = self._first, self._unsent
        self._first, self._unsent = {}, []
        first_batch, others = self._ask(store, first.values()), self._ask(store, rest)
        if first_batch is not None and others is not None:
            waiting = frozenset(id for key in others.keys for id in self._pending[key].request_ids)
            first_batch.others = _Others(waiting, others.answer)

    def _ask(self, store: ChunkStore, unsent: Iterable[bytes]) -> _Batch | None:
        keys = []
        for key in unsent:
            if self._pending[key].request_ids:
                keys.append(key)
            else:  # its requests have finished
                del self._pending[key]
        if not keys:
            return None
        batch = _Batch(keys, store.exists(keys))
        self._batches.append(batch)
        batch.answer.add_done_callback(self._note_answer)
        return batch

    def finish(self, request_id: str) -> None:
        """Forget what was found for a request."""
        self._verdicts.pop(request_id, None)
        for pending in self._pending.values():
            pending.request_ids.discard(request_id)

    def mark_missing(self, keys: Iterable[bytes]) -> None:
        """What could not be loaded is a miss for all requests that are there, so that none tries it for ever."""
        for key in keys:
            for verdicts in self._verdicts.values():
                if key in verdicts:
                    verdicts[key] = False

    def clear(self) -> None:
        """Forget everything; answers that are on their way are not taken."""
        self._verdicts.clear()
        self._pending.clear()
        self._first, self._unsent, self._batches = {}, [], []

    def _note_answer(self, answer: Future[list[bool]]) -> None:
        """In any thread."""
        self._answered = True

    def _collect(self) -> None:
        if not self._answered:
            return
        self._answered = False  # before they are looked at: an answer that comes meanwhile sets it again
        batches, self._batches = self._batches, []
        for batch in batches:
            if not batch.answer.done():
                self._batches.append(batch)
                continue
            found = dict.fromkeys(batch.keys, True) if batch.are_found else _found(batch)
            held = self._held(found, batch.others)
            self._report({key: one for key, one in found.items() if key not in held})
            if held:
                self._batches.append(_Batch(list(held), batch.answer, batch.others, are_found=True))

    def _held(self, found: Mapping[bytes, bool], others: _Others | None) -> set[bytes]:
        """Keys that are reported with the others of their requests."""
        if others is None or others.answer.done():
            return set()
        waiting = others.request_ids
        return {key for key, one in found.items() if one and self._pending[key].request_ids & waiting}

    def _report(self, found: Mapping[bytes, bool]) -> None:
        self._known.add(key for key, one in found.items() if one)
        for key, one in found.items():
            for request_id in self._pending.pop(key).request_ids:
                if request_id in self._verdicts:
                    self._verdicts[request_id].setdefault(key, one)


def _found(batch: _Batch) -> dict[bytes, bool]:
    """A look-up that failed has found nothing."""
    if batch.answer.cancelled():
        return dict.fromkeys(batch.keys, False)
    error = batch.answer.exception()
    if error is None:
        return dict(zip(batch.keys, batch.answer.result(), strict=True))
    _log.warning("kvpool: a look-up of the tier failed, its chunks are misses: %s", error)
    return dict.fromkeys(batch.keys, False)
