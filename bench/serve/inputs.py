"""Conversations from files: ShareGPT-style JSON, and traces of blocks."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.serve.content import Vocabulary
from bench.serve.workload import Conversation, Span, Turn
from kvpool_cli.errors import CommandFailed

_READ_CHARACTERS = 1 << 20
_ITEM_CHARACTERS_MAX = 64 << 20
_CHARACTERS_A_TOKEN = 4
_GAP = re.compile(r"[\s,]*")  # between items
_USERS = ("human", "user")
_ASSISTANTS = ("gpt", "assistant", "chatgpt", "bard", "bing")


@dataclass(frozen=True, slots=True)
class ShareGpt:
    """Recorded conversations, in the order of the file: what people said is asked, what the model said only counts.

    output_tokens: of every answer; None: about as long as the recorded answer was.
    """

    path: Path
    turn_count: int | None  # at most
    output_tokens: Span | None
    seed: int

    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        """Those that have a user turn. Raises CommandFailed."""
        found, rng = False, random.Random(f"{self.seed}/lengths")
        for number, item in enumerate(read_items(self.path), 1):
            turns = self._turns(vocabulary, f"{self.path}: item {number}", item, rng)
            if turns:
                found = True
                yield Conversation(tuple(turns[: self.turn_count]))
        if not found:
            raise CommandFailed(f"{self.path} has no conversation with a user turn")

    def _turns(self, vocabulary: Vocabulary, where: str, item: Any, rng: random.Random) -> list[Turn]:
        messages = item.get("conversations", item.get("messages")) if isinstance(item, dict) else item
        if not isinstance(messages, list):
            raise CommandFailed(f"{where}: want an object with a list `conversations` or `messages`")
        turns: list[Turn] = []
        said: list[str] = []
        for message in messages:
            speaker, text = _message(where, message)
            if speaker in _USERS or speaker == "system":
                said.append(text)
            elif speaker in _ASSISTANTS and said:
                turns.append(Turn(vocabulary.read("\n".join(said)), self._answer_tokens(text, rng)))
                said = []
        if said and not turns:
            turns.append(Turn(vocabulary.read("\n".join(said)), self._answer_tokens("", rng)))
        return [turn for turn in turns if turn.content]

    def _answer_tokens(self, recorded: str, rng: random.Random) -> int:
        if self.output_tokens is not None:
            return max(1, self.output_tokens.draw_count(rng))
        return max(1, len(recorded) // _CHARACTERS_A_TOKEN)


def _message(where: str, message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise CommandFailed(f"{where}: a message is no object")
    speaker = message.get("from", message.get("role"))
    text = message.get("value", message.get("content"))
    if not isinstance(speaker, str) or not isinstance(text, str):
        raise CommandFailed(f"{where}: a message wants `from` and `value`, or `role` and `content`, as text")
    return speaker.lower(), text


def read_items(path: Path) -> Iterator[Any]:
    """The items of a JSON array, or JSON lines, without holding the whole file. Raises CommandFailed."""
    try:
        with path.open(encoding="utf-8") as file:
            yield from _items(str(path), file)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{path} is no text: {error}") from error


def _items(name: str, file: TextIO) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    buffer, at, number = file.read(_READ_CHARACTERS).lstrip("\ufeff \t\r\n"), 0, 0
    in_array = buffer.startswith("[")
    at += in_array
    while True:
        at = _GAP.match(buffer, at).end()  # type: ignore[union-attr]  # it always matches
        if in_array and buffer.startswith("]", at):
            return
        try:
            item, at = decoder.raw_decode(buffer, at)
        except ValueError as error:
            # Twice as much each time, so that one long item is not decoded again and again.
            buffer, at = buffer[at:], 0
            more = file.read(max(_READ_CHARACTERS, len(buffer))) if len(buffer) < _ITEM_CHARACTERS_MAX else ""
            if more:
                buffer += more
                continue
            if not buffer and not in_array:
                return
            raise CommandFailed(f"{name}: item {number + 1} is no JSON: {error}") from error
        except RecursionError as error:
            raise CommandFailed(f"{name}: item {number + 1} is nested too deeply") from error
        number += 1
        yield item


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Recorded requests as JSON lines: timestamp (ms), input_length, output_length, hash_ids.

    The same block gets the same tokens. Lengths are multiplied by `scale`: a small model can take a large trace.
    """

    path: Path
    block_tokens: int  # of the recording
    scale: float

    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        """One turn each, with its start. Raises CommandFailed, with the number of the line that is wrong."""
        first_ms, last_ms = None, 0.0
        for number, item in enumerate(read_items(self.path), 1):
            where = f"{self.path}:{number}"
            timestamp_ms, input_tokens, output_tokens = (
                _number(where, item, field) for field in ("timestamp", "input_length", "output_length")
            )
            first_ms = timestamp_ms if first_ms is None else first_ms
            if number > 1 and timestamp_ms < last_ms:
                raise CommandFailed(f"{where}: timestamp {timestamp_ms:g} is before the one above; sort the trace")
            last_ms = timestamp_ms
            content = self._prompt(vocabulary, where, item.get("hash_ids"), round(input_tokens))
            turn = Turn(content, max(1, round(output_tokens * self.scale)))
            yield Conversation((turn,), (timestamp_ms - first_ms) / 1000)
        if first_ms is None:
            raise CommandFailed(f"{self.path} has no requests; each line wants a JSON object with hash_ids")

    def _prompt(self, vocabulary: Vocabulary, where: str, blocks: Any, input_tokens: int) -> list[int] | str:
        if not isinstance(blocks, list) or not blocks or any(type(block) is not int for block in blocks):
            raise CommandFailed(f"{where}: hash_ids must be a list of integers, at least one")
        if not (len(blocks) - 1) * self.block_tokens < input_tokens <= len(blocks) * self.block_tokens:
            raise CommandFailed(
                f"{where}: {input_tokens} tokens are not {len(blocks)} blocks of {self.block_tokens}: "
                "say --block-tokens"
            )
        block_tokens = max(1, round(self.block_tokens * self.scale))
        last_tokens = max(1, round((input_tokens - (len(blocks) - 1) * self.block_tokens) * self.scale))
        parts = [vocabulary.content(f"block/{block}", block_tokens) for block in blocks[:-1]]
        parts.append(vocabulary.content(f"block/{blocks[-1]}", min(last_tokens, block_tokens)))
        return vocabulary.join(parts)


def _number(where: str, item: Any, field: str) -> float:
    if not isinstance(item, dict):
        raise CommandFailed(f"{where}: want a JSON object")
    value = item.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise CommandFailed(f"{where}: {field} must be a number >= 0, got {json.dumps(value)[:40]}")
    return float(value)
