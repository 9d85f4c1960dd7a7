"""The conversations of the demo, and their rendering to token ids.

A conversation is one document followed by a few questions about it. The prompt of a turn is the prompt of the turn
before it, continued by the reply and the next question, so each prompt begins with the tokens of all earlier ones.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.corpus_files import read_corpus_file
from demo.tokenizer import ChatTokenizer

CONVERSATIONS_PATH = Path(__file__).resolve().parent / "conversations.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A run of whole lines of one corpus file."""

    file: str
    first_line: int  # counted from 1
    last_line: int  # inclusive
    text: str  # ends with a newline

    @classmethod
    def read(cls, file: str, first_line: int, last_line: int) -> Document:
        """Cut the document out of the corpus; ValueError when the file has no such lines."""
        lines = read_corpus_file(file).splitlines()
        if not 1 <= first_line <= last_line <= len(lines):
            raise ValueError(f"{file} has lines 1 to {len(lines)}, not {first_line} to {last_line}")
        text = "\n".join(lines[first_line - 1 : last_line]) + "\n"
        return cls(file=file, first_line=first_line, last_line=last_line, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One document and the questions about it, in the order in which they are asked."""

    name: str
    document: Document
    questions: tuple[str, ...]

    @property
    def turn_count(self) -> int:
        return len(self.questions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """All conversations of the demo."""

    conversations: tuple[Conversation, ...]
    reply_token_count: int  # every reply has exactly this many tokens

    @property
    def turn_count(self) -> int:
        return sum(conversation.turn_count for conversation in self.conversations)


def load_workload(path: Path = CONVERSATIONS_PATH) -> Workload:
    """Read the conversations and the documents they are about.

    Raises ValueError for a document that the corpus does not hold, OSError and KeyError for a broken file.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    return Workload(
        conversations=tuple(_conversation(item) for item in content["conversations"]),
        reply_token_count=int(content["reply_token_count"]),
    )


def render_context(conversation: Conversation, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The token ids of the document: what all turns of the conversation, in every process, begin with."""
    markers = tokenizer.markers
    return (*markers.begin, *tokenizer.encode(conversation.document.text), *markers.end)


def render_prompt(
    conversation: Conversation, replies: Sequence[Sequence[int]], tokenizer: ChatTokenizer
) -> tuple[int, ...]:
    """The token ids to continue in turn `len(replies)`, counted from 0.

    replies: the generated token ids of all earlier turns, oldest first.
    Raises ValueError when the conversation has no such turn.
    """
    if len(replies) >= conversation.turn_count:
        raise ValueError(
            f"{conversation.name} has {conversation.turn_count} turns, so none after {len(replies)} replies"
        )
    markers = tokenizer.markers
    token_ids = list(render_context(conversation, tokenizer))
    for turn, question in enumerate(conversation.questions[: len(replies) + 1]):
        token_ids += (*markers.user, *tokenizer.encode(question), *markers.end, *markers.assistant)
        if turn < len(replies):
            token_ids += (*replies[turn], *markers.end)
    return tuple(token_ids)


def _conversation(item: dict[str, Any]) -> Conversation:
    return Conversation(
        name=str(item["name"]),
        document=Document.read(str(item["file"]), int(item["first_line"]), int(item["last_line"])),
        questions=tuple(str(question) for question in item["questions"]),
    )
