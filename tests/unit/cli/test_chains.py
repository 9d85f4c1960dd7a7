"""Prompts on the command line: files of token ids, or text and what tokenizes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kvpool_cli.errors import CommandFailed, UsageFailed
from kvpool_cli.prompts import TokenSource


class Tokenize(BaseHTTPRequestHandler):
    """vLLM's /tokenize, whose tokens are the characters; a prompt of "bad" gets something else."""

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        tokens = "none" if prompt == "bad" else [ord(char) for char in prompt]
        body = json.dumps({"tokens": tokens}).encode()
        self.send_response(200 if self.path == "/tokenize" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Tokenize) as made:
        thread = Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_a_server_tokenizes_a_text_or_a_file(server: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file")
    assert TokenSource(text="abc", server=server).one() == [97, 98, 99]
    assert TokenSource(text=f"@{file}", server=f"{server}/v1").one() == [ord(char) for char in "from a file"]
    for source in (
        TokenSource(text="bad", server=server),
        TokenSource(text="x", server=f"{server}/other"),
        TokenSource(text="@absent", server=server),
    ):
        with pytest.raises(CommandFailed):
            source.one()


def test_a_tokenizer_file_tokenizes() -> None:
    demo = Path(__file__).parents[3] / "demo"
    tokens = TokenSource(text="The light", tokenizer=str(demo)).one()
    assert tokens and tokens == TokenSource(text="The light", tokenizer=str(demo / "tokenizer.json")).one()


@pytest.mark.parametrize(
    "source",
    [
        TokenSource(),
        TokenSource(text="x"),
        TokenSource(text="x", tokenizer="a", server="http://b"),
        TokenSource(server="http://b"),
        TokenSource(text="x", server="file:///etc/passwd"),
    ],
)
def test_what_does_not_fit_together_is_a_usage_error(source: TokenSource) -> None:
    with pytest.raises(UsageFailed):
        source.one()
