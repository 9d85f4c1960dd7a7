"""Measures engine steps to learn how fast the engine computes prompts."""

from __future__ import annotations

from collections.abc import Callable

_LEAST_TOKENS = 64  # of a step that says something
_LEAST_SHARE = 0.9  # of it that is prompt


class StepTimer:
    """Times steps, which are executed in order; the next one may be scheduled before the last one has ended."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._number = 0
        self._begun: dict[int, tuple[float, int, int]] = {}  # by number: since when, tokens of prompts, all tokens
        self._last_end_s = 0.0

    def begin(self, prefill_tokens: int, all_tokens: int) -> int:
        """Start timing a scheduled step and return its number."""
        self._number += 1
        self._begun[self._number] = (self._now_s(), prefill_tokens, all_tokens)
        return self._number

    def end(self, number: int) -> tuple[int, float] | None:
        """Return prompt tokens and seconds of a step that has ended; None unless it was nearly all prompts."""
        now_s, last_end_s = self._now_s(), self._last_end_s
        begun = self._begun.pop(number, None)
        for lost in [earlier for earlier in self._begun if earlier < number]:
            del self._begun[lost]
        self._last_end_s = now_s
        if begun is None or begun[1] < max(_LEAST_TOKENS, _LEAST_SHARE * begun[2]):
            return None
        return begun[1], now_s - max(begun[0], last_end_s)
