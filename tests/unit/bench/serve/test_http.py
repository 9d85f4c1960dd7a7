"""Servers over HTTP that answer well, badly, or not at all."""

from __future__ import annotations

import asyncio
import socket
from contextlib import aclosing
from typing import Any

import pytest
from aiohttp import web

from bench.serve.api import Api, Chunk, RequestFailed, request_body
from bench.serve.http import HttpServer, open_session
from kvpool_cli.errors import CommandFailed
from tests.fixtures.openai_server import (
    DONE,
    Body,
    OpenAiServer,
    Script,
    begin_stream,
    end_events,
    event,
    token_event,
)


async def ask(
    url: str, api: Api = Api.COMPLETIONS, *, timeout_s: float = 30.0, output_tokens: int = 3, api_key: str = ""
) -> list[Chunk]:
    prompt: dict[str, Any] = {"prompt": [1, 2, 3]}
    if api is Api.CHAT:
        prompt = {"messages": [{"role": "user", "content": "one two"}]}
    async with open_session(timeout_s, api_key) as session:
        server = HttpServer(session, url, api)
        async with aclosing(server.stream(request_body(prompt, "tiny", output_tokens, {}))) as chunks:
            return [chunk async for chunk in chunks]


async def failure(script: Script, *, timeout_s: float = 30.0) -> RequestFailed:
    async with OpenAiServer(script).serving() as url:
        with pytest.raises(RequestFailed) as caught:
            await ask(url, timeout_s=timeout_s)
        return caught.value


@pytest.mark.parametrize("api", list(Api))
@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_a_good_answer(api: Api, suffix: str) -> None:
    server = OpenAiServer()
    async with server.serving() as url:
        chunks = await ask(url + suffix, api, api_key="secret")
    assert [chunk.text for chunk in chunks if chunk.carries_tokens] == ["w0 ", "w1 ", "w2 "]
    assert chunks[-1].usage is not None and chunks[-1].usage.cached_tokens == 0
    if api is Api.COMPLETIONS:
        assert [chunk.token_ids for chunk in chunks[:3]] == [(7000,), (7001,), (7002,)]
    assert server.bodies[0]["max_tokens"] == 3 and server.headers[0]["Authorization"] == "Bearer secret"


async def test_a_stream_that_ends_without_done_after_its_finish_is_well() -> None:
    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(
            token_event(body, 0) + end_events(body, output_tokens=1, prompt_tokens=3).removesuffix(DONE)
        )
        return response

    async with OpenAiServer(script).serving() as url:
        assert (await ask(url))[-1].usage is not None


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
async def test_refusals_are_counted_by_status(status: int) -> None:
    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        return web.Response(status=status, text="no\nroom " + "x" * 100_000)

    error = await failure(script)
    assert error.kind == f"http_{status}" and error.detail.startswith("no room x") and len(error.detail) == 200


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        ('{"error": {"message": "too long", "code": 400}}', "too long"),
        ('{"error": "too long"}', '{"error": "too long"}'),
        ("[" * 5_000, "[" * 200),
        ("", ""),
    ],
)
async def test_the_message_of_a_refusal(said: str, detail: str) -> None:
    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        return web.Response(status=400, text=said)

    assert (await failure(script)).detail == detail


async def test_a_refusal_that_never_ends() -> None:
    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        response = web.StreamResponse(status=500)
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    assert (await failure(script)).kind == "http_500"


@pytest.mark.parametrize("sent", [b"", b"data: {", token_event({}, 0), token_event({}, 0) + b"data: "])
async def test_a_connection_that_is_cut_in_the_middle_of_a_stream(sent: bytes) -> None:
    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(sent)
        assert request.transport is not None
        request.transport.abort()
        return response

    assert (await failure(script)).kind == "disconnect"


async def test_a_stream_that_ends_early_as_if_it_were_well() -> None:
    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(token_event(body, 0))
        return response

    assert (await failure(script)).kind == "disconnect"


async def test_a_server_that_hangs_up_before_it_answers() -> None:
    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    assert (await failure(script)).kind == "disconnect"


@pytest.mark.parametrize("where", ["before the head", "within the stream"])
async def test_a_server_that_falls_silent(where: str) -> None:
    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        if where == "within the stream":
            response = await begin_stream(request)
            await response.write(token_event(body, 0))
        await asyncio.Event().wait()
        raise AssertionError

    assert (await failure(script, timeout_s=0.2)).kind == "timeout"


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"data: nonsense\n\n", "malformed"),
        (b"<html>gateway</html>\n", "malformed"),
        (b"\xff\xfe\n\n", "malformed"),
        (b"data: " + b"x" * (5 << 20), "malformed"),
        (event({"error": {"message": "CUDA out of memory"}}), "server_error"),
        (DONE, ""),
    ],
    ids=["no json", "html", "binary", "a huge line", "an error", "nothing but the end"],
)
async def test_streams_that_are_none(sent: bytes, kind: str) -> None:
    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(sent)
        return response

    if kind:
        assert (await failure(script)).kind == kind
        return
    async with OpenAiServer(script).serving() as url:
        assert await ask(url) == []


async def test_a_json_answer_where_a_stream_was_asked_for() -> None:
    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        return web.json_response({"choices": [{"text": "all at once"}]})

    error = await failure(script)
    assert error.kind == "malformed" and "application/json" in error.detail


@pytest.mark.parametrize(
    "answer", [b"not http at all\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"y" * 100_000 + b"\r\n\r\n", b""]
)
async def test_what_is_no_http(answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        with pytest.raises(RequestFailed) as caught:
            await ask("http://{}:{}".format(*server.sockets[0].getsockname()))
    assert caught.value.kind == ("malformed" if answer else "disconnect")


async def test_no_server_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(RequestFailed) as caught:
            await ask("http://{}:{}".format(*bound.getsockname()))
    assert caught.value.kind == "connect"


async def test_the_first_model_is_found_or_asked_for() -> None:
    async with OpenAiServer().serving() as url, open_session(5.0, "") as session:
        assert await HttpServer(session, url, Api.CHAT).first_model() == "tiny"
        with pytest.raises(CommandFailed, match="is the server up"):
            await HttpServer(session, f"{url}/elsewhere", Api.CHAT).first_model()
        with pytest.raises(RequestFailed, match="more than 10 bytes"):
            await HttpServer(session, url, Api.CHAT).get_text(f"{url}/v1/models", size_bytes_max=10)
