"""What nodes say at /metrics, and what else may listen at the address that they name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from kvpool.cli import top_metrics
from kvpool.cli.doctor.cluster import clock_skew_s
from kvpool.cli.top_metrics import fetch_all, in_threads
from tests.fixtures.patience import PATIENCE_S

BODY = b"kvpool_pagestore_sessions 3.0\n"
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """The address of a server that answers this to everybody."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"


@pytest.mark.parametrize(
    "answer", [b"", b"\x00\x00\x12\x04 not HTTP\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort"]
)
async def test_what_is_no_metrics_server_is_none(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_metrics, "FETCH_TIMEOUT_S", PATIENCE_S)
    async with answering(answer) as strange, answering(GOOD) as good:
        found = await fetch_all([strange, good, good])
        assert not found[strange] and found[good] == {("kvpool_pagestore_sessions", ""): 3.0}
        assert await asyncio.to_thread(clock_skew_s, strange) is None


@pytest.mark.parametrize("url", ["", "file:///etc/passwd", "http://[", "http://host:port/", "http:///x", "http://\n/"])
async def test_what_is_no_address_is_none(url: str) -> None:
    assert await fetch_all([url]) == {url: None}
    assert await asyncio.to_thread(clock_skew_s, url) is None


async def test_a_server_that_trickles_is_left_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(1000))
    monkeypatch.setattr(top_metrics, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
    async with answering(head + BODY * 20_000) as url:
        assert await fetch_all([url]) == {url: None}


async def test_hosts_out_of_reach_are_waited_for_together() -> None:
    everybody = threading.Barrier(64)  # broken, with an error, unless so many wait at once
    assert (
        await in_threads(lambda item: everybody.wait(PATIENCE_S) >= 0, [str(number) for number in range(64)])
        == [True] * 64
    )
