"""Arms fault points from the environment, so that a test can break a real process at a named step.

`KVPOOL_FAULT=NAME:ACTION[:N]`, several of them with commas between; N is the reach that counts, the first by default:

| action | at the N-th reach |
|---|---|
| `kill` | the process ends at once, as by SIGKILL |
| `stop` | it stops, as by SIGSTOP, until SIGCONT |
| `fail`, `fail=REASON` | the step raises the error of that reason (`STORE_FAULT`) |
| `delay=SECONDS` | the thread that takes the step sleeps |

Nothing is armed unless `KVPOOL_ALLOW_FAULTS=1` says that this is meant.
"""

import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Final

from kvpool.core.errors import ERRORS_BY_REASON, StartupFailed
from kvpool.core.fault_points import POINTS, arm

_log = logging.getLogger(__name__)

FAULT_VARIABLE: Final = "KVPOOL_FAULT"
ALLOW_VARIABLE: Final = "KVPOOL_ALLOW_FAULTS"


def arm_faults(env: Mapping[str, str]) -> None:
    """Arm what the environment names. Raises StartupFailed for what is unknown, malformed or not allowed."""
    wishes = env.get(FAULT_VARIABLE, "")
    if not wishes:
        return
    if env.get(ALLOW_VARIABLE) != "1":
        raise StartupFailed(f"{FAULT_VARIABLE} would break this process; unset it, or set {ALLOW_VARIABLE}=1 in a test")
    for wish in wishes.split(","):
        name, action = _parse(wish)
        arm(name, action)
        _log.warning("armed to break: %s", wish)


def _parse(wish: str) -> tuple[str, Callable[[], None]]:
    name, _, rest = wish.strip().partition(":")
    action, _, count = rest.partition(":")
    kind, _, argument = action.partition("=")
    if name not in POINTS:
        raise StartupFailed(f"{FAULT_VARIABLE} names {name!r}, not a fault point; there are {', '.join(POINTS)}")
    if count and not (count.isascii() and count.isdigit() and int(count)):
        raise StartupFailed(f"{FAULT_VARIABLE} counts reaches from 1, not {count!r}: NAME:ACTION[:N]")
    return name, _at_reach(int(count or 1), _act(name, kind, argument))


def _act(name: str, kind: str, argument: str) -> Callable[[], None]:
    if kind == "fail":
        error_type = ERRORS_BY_REASON.get(argument or "STORE_FAULT")
        if error_type is None:
            raise StartupFailed(f"{FAULT_VARIABLE} asks for an error with the unknown reason {argument!r}")

        def fail() -> None:
            raise error_type(f"planted at {name}")

        return fail
    if kind == "delay":
        try:
            delay_s = float(argument)
        except ValueError:
            raise StartupFailed(f"{FAULT_VARIABLE} needs seconds for a delay: delay=0.5, not {argument!r}") from None
        return lambda: time.sleep(delay_s)
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    if kind not in signals or argument:
        raise StartupFailed(f"{FAULT_VARIABLE} knows kill, stop, fail[=REASON] and delay=SECONDS, not {kind!r}")
    return lambda: os.kill(os.getpid(), signals[kind])


def _at_reach(count: int, act: Callable[[], None]) -> Callable[[], None]:
    reached = itertools.count(1)  # thread-safe

    def at_reach() -> None:
        if next(reached) == count:
            act()

    return at_reach
