"""The loop over commands: an answer for each, whatever happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TextIO

from kvpool_gpuagent.measure.measurement import Measurement

_CLOSE_TIMEOUT_S = 10.0


class Lines(Protocol):
    """A text file that is read."""

    def readline(self) -> str:
        """The next line; "" at the end."""
        ...


async def serve(open_measurement: Callable[[], Measurement], commands: Lines, answers: TextIO) -> int:
    """Answer until the commands end; returns the exit code."""

    def answer(document: Mapping[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    try:
        measurement = open_measurement()
        answer(measurement.about())
    except Exception as error:  # the peer prints it; there is nobody else
        answer(_failure(error))
        return 1
    try:
        while line := await asyncio.to_thread(commands.readline):
            answer(await _answer(measurement, line))
    finally:
        with suppress(TimeoutError):
            await asyncio.wait_for(measurement.close(), _CLOSE_TIMEOUT_S)
    return 0


async def _answer(measurement: Measurement, line: str) -> Mapping[str, Any]:
    try:
        command = json.loads(line)
        handler = measurement.commands.get(command["op"])
        if handler is None:
            raise ValueError(f"op must be one of {', '.join(measurement.commands)}, got {command['op']!r}")
        return await handler(command)
    except Exception as error:  # the peer decides whether to go on
        return _failure(error)


def _failure(error: Exception) -> Mapping[str, Any]:
    return {"error": str(error) or type(error).__name__, "type": type(error).__name__}
