"""Connections of the client library that a test breaks."""

from __future__ import annotations

from types import ModuleType

import grpc.aio
import pytest

from kvpool.client.channel import open_channel
from kvpool.client.config import ClientConfig


def opened_channels(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[grpc.aio.Channel]:
    """Return the channels that a module of the client library opens from now on; a connection breaks with its close."""
    channels = list[grpc.aio.Channel]()

    def opening(endpoint: str, config: ClientConfig) -> grpc.aio.Channel:
        channels.append(open_channel(endpoint, config))
        return channels[-1]

    monkeypatch.setattr(module, "open_channel", opening)
    return channels
