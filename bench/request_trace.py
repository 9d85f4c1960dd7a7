"""Reading traces of prefix requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpool_cli.errors import CommandFailed

_COUNTS = ("timestamp", "input_length", "output_length")


@dataclass(frozen=True, slots=True)
class Trace:
    """The blocks of each request, in the order of the file."""

    requests: list[list[int]]

    @property
    def unique_blocks(self) -> int:
        """Different blocks in it."""
        return len({block for blocks in self.requests for block in blocks})


def read_trace(name: str, limit: int = 0) -> Trace:
    """JSON lines with timestamp (ms), input_length, output_length and hash_ids; "-" is stdin.

    limit: requests to read at most; 0: all. Raises CommandFailed, with the number of the line that is wrong.
    """
    requests: list[list[int]] = []
    with _opened(name) as lines:
        try:
            for number, line in enumerate(lines, 1):
                if limit and len(requests) == limit:
                    break
                if line.strip():
                    requests.append(_blocks(f"{name}:{number}", line))
        except UnicodeDecodeError as error:
            raise CommandFailed(f"{name} is no text: {error}") from error
    if not requests:
        raise CommandFailed(f"{name} has no requests; each line wants a JSON object with hash_ids")
    return Trace(requests)


@contextmanager
def _opened(name: str) -> Iterator[Iterable[str]]:
    if name == "-":
        yield sys.stdin
        return
    try:
        with Path(name).open(encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise CommandFailed(f"{name} cannot be read: {error.strerror or error}") from error


def _blocks(where: str, line: str) -> list[int]:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise CommandFailed(f"{where}: no JSON: {error}") from error
    if not isinstance(request, dict):
        raise CommandFailed(f"{where}: want a JSON object, got {line.strip()[:40]}")
    for field in _COUNTS:
        if type(request.get(field, 0)) not in (int, float) or request.get(field, 0) < 0:
            raise CommandFailed(f"{where}: {field} must be a number >= 0, got {json.dumps(request[field])[:40]}")
    blocks = request.get("hash_ids")
    if not isinstance(blocks, list) or any(type(block) is not int for block in blocks):
        raise CommandFailed(f"{where}: hash_ids must be a list of integers, got {json.dumps(blocks)[:40]}")
    if len(set(blocks)) != len(blocks):
        raise CommandFailed(f"{where}: hash_ids names a block twice; the blocks of a request are a chain")
    return blocks
