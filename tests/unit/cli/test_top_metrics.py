"""What nodes say at /metrics, and what else may listen at the address that they name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvpool_cli import top_metrics
from kvpool_cli.doctor.cluster import clock_skew_s
from kvpool_cli.top_metrics import fetch_all, in_threads
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


async def test_hosts_out_of_reach_are_waited_for_together() -> None:
    everybody = threading.Barrier(64)  # broken, with an error, unless so many wait at once
    assert (
        await in_threads(lambda item: everybody.wait(PATIENCE_S) >= 0, [str(number) for number in range(64)])
        == [True] * 64
    )


@pytest.mark.parametrize(
    "form", ["http://{}/secret", "http://a@{}/metrics", "http://{}/metrics?a=b", "ftp://{}/metrics"]
)
async def test_a_url_of_another_form_is_not_asked(form: str) -> None:
    async with answering(GOOD) as good:
        address = good.removeprefix("http://").removesuffix("/metrics")
        url = form.format(address)
        assert await fetch_all([good, url]) == {good: {("kvpool_pagestore_sessions", ""): 3.0}, url: None}
        assert await asyncio.to_thread(clock_skew_s, url) is None


@pytest.mark.parametrize("head", [b"", b"\r\n"])
async def test_a_server_whose_headers_or_samples_trickle_is_given_up(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line comes well within the timeout of a read."""
    monkeypatch.setattr(top_metrics, "FETCH_TIMEOUT_S", 0.3)
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + head)
        while not await _is_over(reader):
            writer.write(b"A: b\r\n")
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
        assert await asyncio.wait_for(fetch_all([url]), PATIENCE_S) == {url: None}
        await asyncio.wait_for(ended.wait(), PATIENCE_S)


async def _is_over(reader: asyncio.StreamReader) -> bool:
    """Whether the other side has ended the connection, within a twentieth of a second."""
    try:
        return not await asyncio.wait_for(reader.read(1024), 0.05)
    except TimeoutError:
        return False
