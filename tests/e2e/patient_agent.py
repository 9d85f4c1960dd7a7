"""An agent that waits for a pagestore's session and slots as long as other services under test wait for each other.

In production it gives up after some seconds, and the engine computes: a test that demands pages would fail where the
machine stands still.
"""

from __future__ import annotations

import sys

from kvpool_gpuagent.adapters import arena_pool, stream_pool
from kvpool_gpuagent.main import main
from tests.fixtures.patience import SERVICES_MS

_SERVICES_S = int(SERVICES_MS) / 1e3
arena_pool.CONNECT_WAIT_S = _SERVICES_S
arena_pool.RESERVE_WAIT_S = _SERVICES_S
stream_pool.RESERVE_WAIT_S = _SERVICES_S

if __name__ == "__main__":
    sys.exit(main())
