"""What is asked: conversations of one or more turns, and the history that a conversation gathers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.serve.content import Content, Vocabulary

SALT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and how long an answer is asked for."""

    content: Content
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other. start_s: when it starts, seconds after the first one; 0 where no trace says."""

    turns: tuple[Turn, ...]
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """A number drawn evenly from [low, high]; one number where both are equal."""

    low: float
    high: float

    def draw(self, rng: random.Random) -> float:
        """One number."""
        return rng.uniform(self.low, self.high) if self.high > self.low else self.low

    def draw_count(self, rng: random.Random) -> int:
        """One whole number."""
        return rng.randint(int(self.low), int(self.high))


def span_from_text(text: str) -> Span:
    """ "128" or "64:256". Raises ValueError, as argparse wants it."""
    low, separator, high = text.partition(":")
    span = Span(float(low), float(high) if separator else float(low))
    if not 0 <= span.low <= span.high < float("inf"):
        raise ValueError(f"want N or LOW:HIGH with 0 <= LOW <= HIGH, got {text}")
    return span


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrefixes:
    """Synthetic: every conversation starts with one of a few prefixes, and goes on with words of its own."""

    prefix_count: int
    prefix_tokens: Span
    suffix_tokens: Span
    output_tokens: Span
    turn_count: int
    turn_tokens: Span  # of each later turn
    zipf: float  # prefix k is taken with weight 1 / k ** zipf; 0: all alike
    seed: int

    def conversations(self, vocabulary: Vocabulary) -> Iterator[Conversation]:
        """Without end; the same row for the same seed."""
        weights = list(itertools.accumulate(1 / rank**self.zipf for rank in range(1, self.prefix_count + 1)))
        lengths = random.Random(f"{self.seed}/prefix lengths")
        prefix_lengths = [self.prefix_tokens.draw_count(lengths) for _ in range(self.prefix_count)]
        rng = random.Random(f"{self.seed}/conversations")
        for number in itertools.count():
            [prefix] = rng.choices(range(self.prefix_count), cum_weights=weights)
            head = vocabulary.content(f"prefix/{prefix}", prefix_lengths[prefix])
            turns = []
            for turn in range(self.turn_count):
                own_tokens = (self.turn_tokens if turn else self.suffix_tokens).draw_count(rng)
                own = vocabulary.content(f"own/{number}/{turn}", own_tokens)
                content = own if turn else vocabulary.join([head, own])
                turns.append(Turn(content, max(1, self.output_tokens.draw_count(rng))))
            yield Conversation(tuple(turns))


class History:
    """What has been said in a conversation: the next prompt."""

    def __init__(self, vocabulary: Vocabulary, *, chat: bool) -> None:
        self._vocabulary, self._chat = vocabulary, chat
        self._messages: list[dict[str, str]] = []
        self._said: Content = [] if isinstance(vocabulary.content("", 0), list) else ""
        self.prompt_tokens = 0  # estimated where content is text

    def ask(self, content: Content) -> None:
        """The user's next words."""
        self.prompt_tokens += self._vocabulary.count(content)
        if self._chat:
            self._messages.append({"role": "user", "content": str(content)})
        elif isinstance(self._said, str):
            self._said += f"\n\n{content}" if self._said else str(content)
        else:
            self._said += [token for token in content if isinstance(token, int)]

    def answer(self, text: str, token_ids: list[int]) -> None:
        """What the model said: ids where prompts are ids, else text."""
        if self._chat:
            self._messages.append({"role": "assistant", "content": text})
            self.prompt_tokens += self._vocabulary.count(text)
        elif isinstance(self._said, str):
            self._said += text
            self.prompt_tokens += self._vocabulary.count(text)
        else:
            self._said += token_ids
            self.prompt_tokens += len(token_ids)

    def fields(self) -> dict[str, Any]:
        """The request's fields that carry the prompt. Copies: the history may grow while they are in use."""
        if self._chat:
            return {"messages": list(self._messages)}
        return {"prompt": self._said if isinstance(self._said, str) else list(self._said)}


def warm_up_conversations(source: Iterator[Conversation], vocabulary: Vocabulary, count: int) -> list[Conversation]:
    """First turns of the shapes to be measured, each behind a salt: no measured prompt shares a prefix with one."""
    made = []
    for number, conversation in enumerate(itertools.islice(source, count)):
        first = conversation.turns[0]
        salt = vocabulary.content(f"warm-up/{number}", SALT_TOKENS)
        made.append(Conversation((Turn(vocabulary.join([salt, first.content]), first.output_tokens),)))
    return made
