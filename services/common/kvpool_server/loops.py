"""The event loop of a service that spends most of its time on small messages."""

import asyncio
import importlib
import os
from collections.abc import Callable


def fast_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, where it is installed (an extra); else None for asyncio's own."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def poll_grpc_directly() -> None:
    """Let the thread that waits for gRPC's events read and write the sockets itself, not by way of gRPC's thread pool.

    For services of small messages: a round trip takes half the time, and half the processor time. Page streams lose a
    third of their rate. Call before gRPC is imported: it looks then, and not again. What GRPC_EXPERIMENTS says in the
    environment stays; gRPC versions without the choice log that and go on.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
