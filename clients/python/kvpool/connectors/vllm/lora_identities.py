"""Identifies LoRA adapters by their files, since names and paths may mean others on other machines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from kvpool.core.errors import ServiceUnavailable

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name
_FILES = ("*.safetensors", "*.bin", "*.pt", "*.json")
_LIMIT = 4096
Start = Callable[[Callable[[], Awaitable[bytes | None]]], "Future[bytes | None]"]


class LoraIdentities:
    """Reads the files of each adapter that vLLM has loaded once, in the background; the oldest entries are evicted."""

    def __init__(self, start: Start, limit: int = _LIMIT) -> None:
        """start: starts work on an event loop; see AgentConnection."""
        self._start, self._limit = start, limit
        self._known: OrderedDict[tuple[int, str, str], Future[bytes | None]] = OrderedDict()

    def identity(self, lora_request: Any) -> bytes | None:
        """Return 32 bytes over the files of a local adapter; None while they are being read, or if they are not here.

        An adapter that vLLM reads again for every request has no identity: its files may have changed since.
        """
        if getattr(lora_request, "load_inplace", False):
            return None
        key = (int(lora_request.lora_int_id), str(lora_request.lora_name), str(lora_request.lora_path))
        known = self._known.get(key)
        if known is None:
            try:
                known = self._start(partial(asyncio.to_thread, directory_digest, Path(key[2]), _FILES))
            except ServiceUnavailable:
                return None
            known.add_done_callback(partial(_log_unreadable, key[1]))
            self._known[key] = known
            while len(self._known) > self._limit:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        usable = known.done() and not known.cancelled() and known.exception() is None
        return known.result() if usable else None


def _log_unreadable(name: str, digest: Future[bytes | None]) -> None:
    if not digest.cancelled() and (error := digest.exception()) is not None:
        _log.warning("kvpool: adapter %s is not shared, its files cannot be read: %s", name, error)


def directory_digest(directory: Path, patterns: Sequence[str]) -> bytes | None:
    """Return 32 bytes over names and contents of the matching files; None if there are none. raises: OSError."""
    files = sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
    if not files:
        return None
    hasher = hashlib.blake2b(digest_size=32)
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, hashlib.blake2b).digest()
        hasher.update(json.dumps(path.name).encode() + content)
    return hasher.digest()
