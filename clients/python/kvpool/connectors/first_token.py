"""When the first token of a generation came."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class FirstTokenTimer:
    """A streamer for `generate` that takes the time of the first token and hands everything on."""

    def __init__(self, streamer: Any = None) -> None:
        self._streamer = streamer
        self._prompt_seen = self._prompt_comes_again = False
        self.at_s: float | None = None  # of time.perf_counter

    def put(self, value: torch.Tensor) -> None:
        """transformers hands over the prompt first, then token by token."""
        if self._prompt_comes_again:
            self._prompt_comes_again = False
            return
        if self._prompt_seen and self.at_s is None:
            self.at_s = time.perf_counter()
        self._prompt_seen = True
        if self._streamer is not None:
            self._streamer.put(value)

    def restart(self) -> None:
        """The generation begins again after it failed before its first token."""
        self._prompt_comes_again = self._prompt_seen

    def end(self) -> None:
        """Generation has ended."""
        if self._streamer is not None:
            self._streamer.end()
