"""How long threads of kvpool wait for the interpreter while an engine's own thread computes in Python."""

from __future__ import annotations

import sys

# CPython lets the engine's thread run for 5 ms while another one waits to run Python: for each message of a load, and
# for each page that a thread verifies and copies, several times. A thread that is kept waiting costs the engine's
# nothing, and one that is let run soon takes no longer for its work.
_SWITCH_INTERVAL_S = 0.00005


def shorten_switch_interval() -> None:
    """Have all threads of this process wait for each other no longer than 50 microseconds."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
