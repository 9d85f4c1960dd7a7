"""Waiting for what another task, thread or process brings about: polled, with a deadline, never a bare sleep."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast, overload

ResultT = TypeVar("ResultT")

DEADLINE_S = 60.0  # a guard against waiting for ever: machines that run tests stand still for seconds at a time
_POLL_INTERVAL_S = 0.005


@overload
async def eventually(
    predicate: Callable[[], Awaitable[ResultT]], deadline_s: float = DEADLINE_S, message: str = ""
) -> ResultT: ...
@overload
async def eventually(
    predicate: Callable[[], ResultT], deadline_s: float = DEADLINE_S, message: str = ""
) -> ResultT: ...
async def eventually(
    predicate: Callable[[], ResultT | Awaitable[ResultT]], deadline_s: float = DEADLINE_S, message: str = ""
) -> ResultT:
    """The predicate's first true value. Raises AssertionError, naming its last value, when `deadline_s` have passed.

    An AssertionError of the predicate counts as "not yet" and is chained to the final one.
    """
    ends_at_s = time.monotonic() + deadline_s
    while True:
        value, failure = None, None
        try:
            answer = predicate()
            value = cast(ResultT, await answer if inspect.isawaitable(answer) else answer)
            if value:
                return value
        except AssertionError as error:
            failure = error
        if time.monotonic() >= ends_at_s:
            raise AssertionError(_describe(message, deadline_s, value)) from failure
        await asyncio.sleep(_POLL_INTERVAL_S)


def eventually_sync(predicate: Callable[[], ResultT], deadline_s: float = DEADLINE_S, message: str = "") -> ResultT:
    """The same for a caller without an event loop."""
    ends_at_s = time.monotonic() + deadline_s
    while True:
        value, failure = None, None
        try:
            value = predicate()
            if value:
                return value
        except AssertionError as error:
            failure = error
        if time.monotonic() >= ends_at_s:
            raise AssertionError(_describe(message, deadline_s, value)) from failure
        time.sleep(_POLL_INTERVAL_S)


def _describe(message: str, deadline_s: float, value: object) -> str:
    return f"{message or 'condition'} did not come true within {deadline_s:g} s; last value: {value!r}"
