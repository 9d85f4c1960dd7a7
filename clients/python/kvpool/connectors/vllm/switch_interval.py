"""How long threads of kvpool wait for the interpreter while an engine's own thread computes in Python."""

from __future__ import annotations

import sys

# CPython lets the engine's thread run for 5 ms while another one waits to run Python: for each message of a load again,
# and for each block of a page that is verified, 64 of them in 16 MiB. An engine has one such thread, so that others pay
# nothing.
_SWITCH_INTERVAL_S = 0.0005


def shorten_switch_interval() -> None:
    """Have all threads of this process wait for each other no longer than half a millisecond."""
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
