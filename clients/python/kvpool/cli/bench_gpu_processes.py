"""The processes of the GPU bench: a JSON command a line, a JSON answer a line, and never a wait without an end."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvpool.cli.output import CommandFailed

START_TIMEOUT_S = 120.0  # torch from a cold disk
ANSWER_TIMEOUT_S = 60.0  # kernels are compiled when first used
_END_TIMEOUT_S = 15.0


class ProcessFailed(CommandFailed):
    """A process of the bench has ended or does not answer: nothing more can be measured with it."""


class CommandRefused(CommandFailed):
    """It answered that it cannot do that; it goes on."""


class Process:
    """Ends with this process, however that ends. Use it from one thread, which outlives it."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """command: a Python module and its arguments."""
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        leash = [sys.executable, "-m", "kvpool.cli.leash", str(os.getpid()), sys.executable, "-m"]
        self._process = subprocess.Popen(
            [*leash, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"{name}-answers", daemon=True).start()

    def ask(self, command: Mapping[str, Any], timeout_s: float = ANSWER_TIMEOUT_S) -> Mapping[str, Any]:
        """Its answer. Raises CommandRefused, ProcessFailed."""
        self.tell(command)
        return self.answer(timeout_s)

    def tell(self, command: Mapping[str, Any]) -> None:
        """Send a command; its answer is fetched later. Raises ProcessFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ProcessFailed(f"{self.name} has ended: {self._last_words()}") from error

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Mapping[str, Any]:
        """The next answer. Raises CommandRefused, ProcessFailed."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self._process.kill()
            raise ProcessFailed(f"{self.name} did not answer within {timeout_s:g} s and was ended") from None
        if line is None:
            raise ProcessFailed(f"{self.name} has ended: {self._last_words()}")
        answer: Mapping[str, Any] = json.loads(line)
        if "error" in answer:
            raise CommandRefused(f"{self.name}: {answer['error']} ({answer['type']})")
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_END_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps it; the kernel ends it some day
                self._process.wait(_END_TIMEOUT_S)
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                if line.startswith("{"):  # libraries sometimes print a line of their own
                    self._lines.put(line)
        self._lines.put(None)

    def _last_words(self) -> str:
        try:
            code: int | str = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = "unknown"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}, last line: {lines[-1] if lines else 'none'}"
