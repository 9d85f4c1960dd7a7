"""Peers that take a connection and do not shake hands yet: they stand still for a moment, or are far away."""

from __future__ import annotations

import socket
from typing import Any

import grpc.aio

from kvpool.client.channel import open_channel
from kvpool.client.config import ClientConfig
from kvpool.testing import eventually


async def test_a_handshake_that_takes_longer_than_a_moment_is_waited_for() -> None:
    """A call waits for the connection until its own deadline, and does not fail at once because no server is there."""

    async def ends_by_its_deadline() -> bool:
        async with open_channel(f"127.0.0.1:{silent.getsockname()[1]}", ClientConfig()) as channel:
            call: Any = channel.unary_unary("/kvpool.v1.IndexService/GetIndexInfo")
            return await call(b"", timeout=0.5).code() is grpc.StatusCode.DEADLINE_EXCEEDED

    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel connects; no one answers
        await eventually(ends_by_its_deadline, 10.0)
