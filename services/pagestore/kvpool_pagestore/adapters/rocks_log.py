"""Making the log of a database durable past the binding, which keeps the interpreter's lock through a synced write."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvpool.core.errors import StoreFault
from kvpool_pagestore.adapters.durable_names import sync_directory

_log = logging.getLogger(__name__)

_SUFFIX: Final = ".log"


class DatabaseLog:
    """The log files of one database. Thread-safe; a sync covers all who asked for one before it began.

    The kernel tells of a lost write once per open file and takes what it could not write for written: a later sync says
    nothing of it, and records behind the gap would not be found again. So files stay open from their first sync until
    they are gone (their blocks with them, at the next sync), and after a failure nothing is durable before all that the
    log should hold has been written elsewhere.
    """

    def __init__(self, directory: Path, rewrite: Callable[[], None]) -> None:
        """rewrite: have all records in synced tables, and begin a new log file. Raises StoreFault."""
        self._directory = directory
        self._rewrite = rewrite
        self._lock = threading.Lock()
        self._tickets = itertools.count()
        self._covered = 0  # tickets below this one need no sync any more
        self._descriptors: dict[str, int] = {}
        self._known: set[str] = set()  # files whose names are durable
        self._is_broken = False

    def failed(self) -> None:
        """The database could not write or sync its log by itself."""
        with self._lock:
            self._is_broken = True

    def sync(self) -> None:
        """Make all that was written before this call durable. Raises StoreFault."""
        ticket = next(self._tickets)
        with self._lock:
            if ticket < self._covered:
                return
            covered = next(self._tickets)
            was_broken, self._is_broken = self._is_broken, False
            try:
                if was_broken:
                    self._rewrite()
                    _log.warning("the log in %s was written anew", self._directory)
                else:
                    self._sync_files()
            except BaseException:
                self._is_broken = True
                raise
            self._covered = covered

    def close(self) -> None:
        """Let go of files."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def _sync_files(self) -> None:
        """What is not in a log file any more is in a synced table."""
        try:
            names = {name for name in os.listdir(self._directory) if name.endswith(_SUFFIX)}
            for name in self._descriptors.keys() - names:
                os.close(self._descriptors.pop(name))
            for name in names - self._descriptors.keys():
                with suppress(FileNotFoundError):
                    self._descriptors[name] = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
            for descriptor in self._descriptors.values():
                os.fdatasync(descriptor)
            if not names <= self._known:
                sync_directory(self._directory)
                self._known = names
        except OSError as error:
            raise StoreFault(f"syncing the log in {self._directory} failed: {error.strerror}") from error
