"""Load on engines, and a check of every token. In a pod: `python load.py URL --clients 2 --rate 2`.

Prompts share prefixes: one of a few documents, then a question. Some requests bring a document that no engine has seen,
which engines then store. What is right is what an engine says without kvpool; it is asked once for each prompt. One
line of JSON on stdout for each request, until SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from itertools import zip_longest
from typing import Any

VOCABULARY = range(8, 1000)  # token ids; all text is equal to a model with random weights
DOCUMENT_TOKENS, QUESTION_TOKENS, NEW_TOKENS = 448, 32, 4
QUESTIONS = 2  # of each document
REQUEST_TIMEOUT_S = 60.0


class Prompts:
    """Documents by number: the first ones are asked all the time, later ones are fresh once and then asked as well."""

    def __init__(self, documents: int, fresh_share: float) -> None:
        self._random, self._fresh_share = random.Random(1), fresh_share
        self._known: deque[int] = deque(range(documents), maxlen=documents)
        self._next = documents

    def pick(self) -> tuple[int, int, bool]:
        """Document, question, and whether it is new."""
        if self._random.random() < self._fresh_share:
            self._known.append(self._next)
            self._next += 1
            return self._known[-1], 0, True
        return self._random.choice(self._known), self._random.randrange(QUESTIONS), False


def tokens_of(document: int, question: int) -> list[int]:
    """The same ones each time."""
    prefix, suffix = random.Random(document), random.Random(document * QUESTIONS + question + (1 << 40))
    return [prefix.choice(VOCABULARY) for _ in range(DOCUMENT_TOKENS)] + [
        suffix.choice(VOCABULARY) for _ in range(QUESTION_TOKENS)
    ]


def ask(url: str, prompt: list[int], plain: bool) -> dict[str, Any]:
    """An engine's answer, over a connection of its own. Raises OSError, and ValueError for what is no JSON."""
    body = json.dumps({"prompt": prompt, "new_tokens": NEW_TOKENS, "plain": plain}).encode()
    with urllib.request.urlopen(f"{url}/generate", data=body, timeout=REQUEST_TIMEOUT_S) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


class Load:
    """Clients that ask one request after the other."""

    def __init__(self, url: str, prompts: Prompts, interval_s: float) -> None:
        self._url, self._prompts, self._interval_s = url, prompts, interval_s
        self._right: dict[tuple[int, int], list[int]] = {}
        self._lock, self.stopped = threading.Lock(), threading.Event()

    def run(self) -> None:
        """One client, until stopped."""
        while not self.stopped.is_set():
            started_s = time.monotonic()
            with self._lock:
                document, question, fresh = self._prompts.pick()
            self._request(document, question, fresh)
            self.stopped.wait(max(0.0, self._interval_s - (time.monotonic() - started_s)))

    def _request(self, document: int, question: int, fresh: bool) -> None:
        prompt, key = tokens_of(document, question), (document, question)
        if key not in self._right:
            answer = self._timed(prompt, plain=True)
            if answer is None:
                return
            self._right[key] = answer["tokens"]
        self._timed(prompt, plain=False, right=self._right[key], fresh=fresh)

    def _timed(self, prompt: list[int], **known: Any) -> dict[str, Any] | None:
        at_s, started_s = time.time(), time.monotonic()
        said: dict[str, Any] = {"at_s": at_s, "plain": known["plain"], "fresh": known.get("fresh", False)}
        answer = None
        try:
            answer = ask(self._url, prompt, known["plain"])
        except urllib.error.HTTPError as error:
            said["error"] = f"{error.code}: {error.read().decode(errors='replace')}"
        except (OSError, ValueError) as error:
            said["error"] = f"{type(error).__name__}: {error}"
        said["seconds"] = round(time.monotonic() - started_s, 4)
        if answer is not None:
            said |= {name: answer[name] for name in ("sources", "failure", "engine")}
            pairs = zip_longest(answer["tokens"], known.get("right", answer["tokens"]))
            said["wrong_tokens"] = sum(one != right for one, right in pairs)
        with self._lock:  # lines of two clients must not mix
            sys.stdout.write(json.dumps(said) + "\n")
            sys.stdout.flush()
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, all clients together, at most")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--fresh-share", type=float, default=0.05, help="of requests that bring a new document")
    arguments = parser.parse_args()
    load = Load(arguments.url, Prompts(arguments.documents, arguments.fresh_share), arguments.clients / arguments.rate)
    signal.signal(signal.SIGTERM, lambda *_: load.stopped.set())
    clients = [threading.Thread(target=load.run) for _ in range(arguments.clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()


if __name__ == "__main__":
    main()
