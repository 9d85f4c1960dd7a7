"""An engine behind HTTP: the demo's model, with kvpool or without. In a pod: `python engine.py AGENT PORT`.

POST /generate {"prompt": [token ids], "new_tokens": n, "plain": whether without kvpool} answers the generated token ids
and where the prompt's KV came from. Every prompt is asked of the pool: the engine forgets its own chunks.
GET /health answers once the model is ready. SIGTERM ends it after the requests that run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from argparse import Namespace
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from demo.engine import connected, plain, warm_up
from demo.model import DemoModel, build_model
from kvpool.connectors.first_token import FirstTokenTimer
from kvpool.connectors.transformers import SharedPrefixGenerator

CACHE_BYTES = 128 << 20  # 8,192 tokens of the demo's model


class Engine:
    """One request at a time, as one GPU has it."""

    def __init__(self, model: DemoModel, generator: SharedPrefixGenerator) -> None:
        self._plain, self._generator, self._turn = plain(model), generator, threading.Lock()

    def generate(self, prompt: list[int], new_tokens: int, without_kvpool: bool) -> dict[str, Any]:
        """new_tokens are generated greedily."""
        input_ids = torch.tensor([prompt], dtype=torch.long)
        with self._turn:
            if without_kvpool:
                sequences, stats = self._plain(input_ids, new_tokens, FirstTokenTimer())
                failure = ""
            else:
                self._generator.forget()
                result = self._generator.generate(input_ids, max_new_tokens=new_tokens, do_sample=False)
                sequences, stats, failure = result.sequences, result.stats.prompt_tokens, result.stats.failure
        return {
            "tokens": sequences[0, len(prompt) :].tolist(),
            "sources": asdict(stats),
            "failure": failure,
            "engine": os.environ.get("HOSTNAME", ""),
        }


def handler_of(engine: Engine) -> type[BaseHTTPRequestHandler]:
    """The two calls."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200 if self.path == "/health" else 404, {})

        def do_POST(self) -> None:
            try:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = engine.generate(asked["prompt"], asked["new_tokens"], asked["plain"])
            except Exception as error:  # it is this answer that the rollouts count
                self._answer(500, {"error": f"{type(error).__name__}: {error}"})
                raise
            self._answer(200, answer)

        def _answer(self, status: int, document: dict[str, Any]) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: the caller logs what came."""

    return Handler


class Server(ThreadingHTTPServer):
    """Waits for the requests that run when it is closed."""

    daemon_threads = False
    request_queue_size = 64


def main() -> int:
    agent, port = sys.argv[1:]
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    torch.set_num_threads(1)
    model = build_model(None, 0)
    warm_up(model)
    with connected(model, Namespace(agent=agent, name="engine", cache_bytes=CACHE_BYTES)) as generator:
        assert generator is not None
        server = Server(("0.0.0.0", int(port)), handler_of(Engine(model, generator)))
        threading.Thread(target=server.serve_forever).start()
        stopped.wait()
        server.shutdown()
        server.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
