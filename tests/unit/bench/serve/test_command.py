"""The command from its options to its files, against a server in the same process."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench.__main__ import main
from bench.serve.api import Chunk
from bench.serve.command import progress_line
from bench.serve.content import IdVocabulary
from bench.serve.drive import Load
from bench.serve.options import declare, plan_of
from bench.serve.record import Recorder
from tests.fixtures.openai_server import Body, OpenAiServer, serving_in_thread

SMALL = ["--prefixes", "2", "--prefix-tokens", "32", "--suffix-tokens", "8", "--output-tokens", "3", "--warmup", "2"]


@pytest.fixture
def server() -> Iterator[OpenAiServer]:
    """Serving; its `url` is set."""
    made = OpenAiServer()
    with serving_in_thread(made):
        yield made


def serve(*options: object) -> int:
    return main(["serve", *map(str, options)])


def measured(capsys: pytest.CaptureFixture[str], *options: object) -> dict[str, Any]:
    assert serve(*options, "--json", "-") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_shared_prefixes(server: OpenAiServer, capsys: pytest.CaptureFixture[str]) -> None:
    document = measured(capsys, "--base-url", server.url, *SMALL, "--requests", 20, "--concurrency", 2)
    assert document["requests"]["ok"] == 20 and len(server.bodies) == 22
    assert document["model"] == "tiny" and document["api"] == "completions" and not document["open_loop"]
    assert document["tokens"] == {
        "prompt": 20 * 40,
        "output": 60,
        "cached": document["tokens"]["cached"],
        "requests_that_tell_cached": 20,
        "requests_counted_here": 0,
    }
    # Both prefixes were asked for first without being cached: warm-up must not have brought them.
    assert document["tokens"]["cached"] == 18 * 32
    assert document["tiers"] == {"own": 18 * 32, "computed": 20 * 40 - 18 * 32}
    assert {len(body["prompt"]) for body in server.bodies[2:]} == {40}


def test_turns_of_a_chat_hit_what_was_said(server: OpenAiServer, capsys: pytest.CaptureFixture[str]) -> None:
    document = measured(
        capsys, "--base-url", server.url, *SMALL, "--api", "chat", "--turns", 3, "--requests", 6, "--concurrency", 1
    )
    assert [len(body["messages"]) for body in server.bodies[2:]] == [1, 3, 5, 1, 3, 5]
    assert server.bodies[3]["messages"][1] == {"role": "assistant", "content": "w0 w1 w2 "}
    assert len(document["ttft_by_turn_s"]) == 3


def test_open_loop_with_all_outputs(server: OpenAiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {name: tmp_path / name for name in ("run.json", "page.html", "log.jsonl")}
    code = serve(
        *("--base-url", server.url, *SMALL, "--rate", 500, "--requests", 8, "--goodput", "ttft=60s,tpot=9000ms"),
        *("--json", names["run.json"], "--html", names["page.html"], "--log", names["log.jsonl"]),
        *("--extra-body", '{"ignore_eos": true}'),
    )
    assert code == 0
    document = json.loads(names["run.json"].read_text())
    assert document["open_loop"] and document["name"] == "run"
    assert document["goodput"]["limits_s"] == {"ttft": 60.0, "tpot": 9.0} and document["goodput"]["share"] == 1.0
    assert re.search(r"p50 +p90 +p99 +mean +largest\n.*\ntime to first token", capsys.readouterr().out)
    assert names["page.html"].read_text().startswith("<!doctype html>")
    lines = [json.loads(line) for line in names["log.jsonl"].read_text().splitlines()]
    assert len(lines) == 8 and all(line["error"] == "" and line["output_tokens"] == 3 for line in lines)
    assert all(body["ignore_eos"] is True for body in server.bodies)


def test_the_same_seed_asks_the_same(server: OpenAiServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--base-url", server.url, *SMALL, "--requests", 5, "--concurrency", 1)
    ids = [measured(capsys, *options, "--seed", seed)["load_id"] for seed in (3, 3, 4)]
    prompts = [str([body["prompt"] for body in server.bodies[at : at + 7]]) for at in (0, 7, 14)]
    assert ids[0] == ids[1] != ids[2] and prompts[0] == prompts[1] != prompts[2]


def test_a_block_trace(server: OpenAiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at * 1000, "input_length": 1024, "output_length": 40, "hash_ids": [0, at]} for at in range(1, 6)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    document = measured(
        *(capsys, "--base-url", server.url, "--workload", "block-trace", "--input", trace, "--warmup", 0),
        *("--speed", 1000, "--scale-tokens", 0.0625),
    )
    assert document["open_loop"] and document["requests"]["ok"] == 5
    assert {(len(body["prompt"]), body["max_tokens"]) for body in server.bodies} == {(64, 2)}
    assert {tuple(body["prompt"][:32]) for body in server.bodies} == {tuple(server.bodies[0]["prompt"][:32])}
    assert document["tokens"]["cached"] == 4 * 32


def test_sharegpt_as_text(server: OpenAiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "talks.json"
    said = [("human", "tell me"), ("gpt", "long ago and far away"), ("human", "more"), ("gpt", "the end.")]
    file.write_text(json.dumps([{"conversations": [{"from": who, "value": what} for who, what in said]}] * 3))
    options = ("--base-url", server.url, "--workload", "sharegpt", "--input", file, "--warmup", 0, "--concurrency", 1)
    measured(capsys, *options, "--prompt", "text")
    assert [body["prompt"] for body in server.bodies[:2]] == ["tell me", "tell mew0 w1 w2 w3 w4 \n\nmore"]
    assert len(server.bodies) == 6


def test_failures_are_shown_and_a_run_of_only_failures_fails(
    server: OpenAiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(request: web.Request, body: Body) -> web.StreamResponse:
        return web.Response(status=429, text="slow down")

    server.script = refuse
    assert serve("--base-url", server.url, *SMALL, "--requests", 3) == 1
    shown = capsys.readouterr().out
    assert "http_429 3: slow down" in shown and "No request ended well" in shown and "2 of 2 warm-up" in shown


def test_ctrl_c_shows_what_was_measured(server: OpenAiServer, capsys: pytest.CaptureFixture[str]) -> None:
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    async def stall_after_five(request: web.Request, body: Body) -> web.StreamResponse:
        if len(server.bodies) > 5:
            signal.pthread_kill(main_thread, signal.SIGINT)
            await asyncio.Event().wait()
        return await server.answer(request, body)

    server.script = stall_after_five
    options = ("--base-url", server.url, *SMALL, "--warmup", 0, "--requests", 99, "--concurrency", 1)
    assert serve(*options, "--json", "-") == 1
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["interrupted"] and document["requests"]["ok"] == 5 and document["requests"]["unfinished"] == 1
    assert "stopping" in shown.err


@pytest.mark.parametrize("option", ["--base-url", "--metrics"])
def test_secrets_go_into_no_file(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--base-url", "http://127.0.0.1:1", "--requests", 1, option, "http://me:hush@127.0.0.1:1/x") == 1
    shown = capsys.readouterr()
    assert "--api-key-env" in shown.err and "hush" not in shown.out + shown.err


def test_bearer_keys_come_from_the_environment(
    server: OpenAiServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "hush")
    document = measured(capsys, "--base-url", server.url, *SMALL, "--requests", 1)
    assert server.headers[-1]["Authorization"] == "Bearer hush" and "hush" not in json.dumps(document)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "say --requests or --duration-s"),
        (["--input", "x", "--requests", "1"], "--input is for"),
        (["--workload", "sharegpt"], "say --input"),
        (["--workload", "sharegpt", "--input", "/absent"], "/absent cannot be read"),
        (["--requests", "1", "--speed", "2"], "--speed is for"),
        (["--requests", "1", "--api", "chat", "--prompt", "ids"], "--api chat takes text"),
        (["--duration-s", "5", "--discard-s", "5"], "--discard-s leaves nothing"),
        (["--requests", "1", "--html", "/absent/x.html"], "/absent is no directory"),
        (["--requests", "1", "--log", "/absent/x"], "cannot be written"),
        (["--requests", "1", "--base-url", "host:1"], "wants http:// or https://"),
        (["--requests", "1", "--base-url", "http://127.0.0.1:1", "--model", ""], "is the server up"),
    ],
)
def test_what_cannot_be_done_is_said(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("--base-url", "http://127.0.0.1:1", "--model", "m", *options) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        *(["--rate", "0"], ["--rate", "inf"], ["--concurrency", "0"], ["--warmup", "-1"], ["--zipf", "-1"]),
        *(["--prefix-tokens", "9:2"], ["--token-ids", "5:5"], ["--extra-body", "5"], ["--extra-body", "{"]),
        *(["--goodput", "ttft=5"], ["--goodput", "speed=5ms"], ["--api", "other"], ["--discard-s", "-1"]),
    ],
)
def test_options_that_make_no_sense(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve("--base-url", "http://127.0.0.1:1", *options)
    assert options[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "open_loop", "limit"),
    [
        ([], False, 8),
        (["--concurrency", "3"], False, 3),
        (["--rate", "5"], True, 10_000),
        (["--rate", "5", "--concurrency", "3"], True, 3),
        (["--workload", "block-trace"], True, 10_000),
        (["--workload", "block-trace", "--concurrency", "3"], False, 3),
        (["--workload", "block-trace", "--concurrency", "3", "--speed", "2"], True, 3),
        (["--workload", "block-trace", "--rate", "3"], True, 10_000),
    ],
)
def test_which_loop(options: list[str], open_loop: bool, limit: int) -> None:
    parser = argparse.ArgumentParser()
    declare(parser)
    plan = plan_of(parser.parse_args(["--base-url", "http://x", *options]), "m")
    assert (plan.open_loop, plan.conversation_limit) == (open_loop, limit)


class Unasked:
    """A server that nothing is asked of."""

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        yield Chunk()


async def test_progress_is_one_line() -> None:
    parser = argparse.ArgumentParser()
    declare(parser)
    plan = plan_of(parser.parse_args(["--base-url", "http://x", "--requests", "8"]), "m")
    recorder = Recorder({}, 0.0, 1)
    load = Load(plan, Unasked(), IdVocabulary(1, 1, 2), recorder)
    load.sent = 4
    line = progress_line(plan, recorder, load, 2.0)
    assert line.startswith("[############............] 2 s, 0 done, 0 under way") and "\n" not in line
