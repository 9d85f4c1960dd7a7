"""The server under load, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from bench.serve.api import DETAIL_CHARACTERS, DONE, Api, Chunk, RequestFailed, chunk_from_data
from bench.serve.sse import EventReader, StreamBroken
from kvpool_cli.errors import CommandFailed

# Servers drop idle connections, uvicorn after 5 s. A request on one that is just being dropped would look like a fault
# of the server, so we drop them earlier.
_KEEPALIVE_S = 3.0
_CONNECT_TIMEOUT_S = 30.0
_SMALL_CALL_TIMEOUT_S = 10.0
_SMALL_ANSWER_BYTES = 1 << 20
_READ_BYTES = 1 << 16


@asynccontextmanager
async def open_session(timeout_s: float, api_key: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Connections without a limit of number: how many requests are under way is for the load to say."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, _CONNECT_TIMEOUT_S))
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=_READ_BYTES, max_line_size=16384
    ) as session:
        yield session


class HttpServer:
    """A server that speaks an OpenAI API."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, api: Api) -> None:
        self._session = session
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._url = self._base_url + api.path

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The chunks of one answer, up to its proper end. Raises RequestFailed."""
        try:
            async with self._session.post(self._url, json=body, headers={"Accept": "text/event-stream"}) as response:
                if response.status != 200:
                    raise RequestFailed(f"http_{response.status}", await _beginning(response))
                if response.content_type != "text/event-stream":
                    raise RequestFailed("malformed", f"{response.content_type} where an event stream was asked for")
                async for chunk in _chunks(response):
                    yield chunk
        except StreamBroken as error:
            raise RequestFailed("malformed", str(error)) from error
        except TimeoutError as error:
            raise RequestFailed("timeout", str(error) or "no end within --timeout-s") from error
        except aiohttp.ClientConnectorError as error:
            raise RequestFailed("connect", str(error)) from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise RequestFailed("disconnect", str(error) or type(error).__name__) from error
        except (aiohttp.ClientResponseError, aiohttp.http_exceptions.HttpProcessingError) as error:
            raise RequestFailed("malformed", str(error)) from error
        except aiohttp.ClientError as error:
            raise RequestFailed("disconnect", f"{type(error).__name__}: {error}") from error

    async def first_model(self) -> str:
        """The name of the first model that the server lists. Raises CommandFailed."""
        url = f"{self._base_url}/v1/models"
        try:
            listed = json.loads(await self.get_text(url))
            return str(listed["data"][0]["id"])
        except RequestFailed as error:
            raise CommandFailed(f"{url}: {error}; is the server up? say --model to ask without this list") from error
        except (ValueError, LookupError, TypeError) as error:
            raise CommandFailed(f"{url} lists no model; say --model") from error

    @property
    def metrics_url(self) -> str:
        """Where vLLM and SGLang have their Prometheus metrics."""
        return f"{self._base_url}/metrics"

    async def get_text(self, url: str, size_bytes_max: int = _SMALL_ANSWER_BYTES) -> str:
        """One small document. Raises RequestFailed."""
        return await get_text(self._session, url, size_bytes_max)


async def get_text(session: aiohttp.ClientSession, url: str, size_bytes_max: int) -> str:
    """A document by GET. Raises RequestFailed."""
    try:
        async with asyncio.timeout(_SMALL_CALL_TIMEOUT_S), session.get(url) as response:
            if response.status != 200:
                raise RequestFailed(f"http_{response.status}", await _beginning(response))
            received = bytearray()
            async for piece in response.content.iter_chunked(_READ_BYTES):
                received += piece
                if len(received) > size_bytes_max:
                    raise RequestFailed("malformed", f"more than {size_bytes_max} bytes")
            return received.decode(errors="replace")
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise RequestFailed("connect", str(error) or type(error).__name__) from error


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[Chunk]:
    reader = EventReader()
    finished = False
    async for received in response.content.iter_any():
        for data in reader.feed(received):
            if data == DONE:
                return
            chunk = chunk_from_data(data)
            finished |= chunk.finished
            yield chunk
    if reader.unfinished or not finished:
        raise RequestFailed("disconnect", "the stream ended in the middle of an answer")


async def _beginning(response: aiohttp.ClientResponse) -> str:
    """What a server says about a refusal, of any length: the message, where it is an OpenAI error."""
    said = (await response.content.read(DETAIL_CHARACTERS * 4)).decode(errors="replace")
    try:
        return str(json.loads(said)["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return said
