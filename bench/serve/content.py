"""What prompts are made of: token ids or words that follow from a seed and a name alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from blake3 import blake3

# Token ids, where no tokenizer is at hand, or text.
Content = list[int] | str

_WORD_LIST = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend
father power hour game line end member law car city community name president team minute idea kid body
information back parent face others level office door health person art war history party result change morning
reason research girl guy moment air teacher force education foot boy age policy music market sense nation plan
college interest death course someone experience behind reach local kill six remain effect use yard suggest early
light thank receive value international building action full model join season society because tax director
position player agree especially record pick wear paper special space ground form support event official whose
matter everyone center couple site project hit base activity star table need court produce oil half situation
easy cost industry figure street image itself phone either data cover quite picture clear practice piece land
recent describe product doctor wall patient worker news test movie certain north love personal open simply third
technology catch step baby computer type attention draw film tree source red nearly organization choose cause
hair look point century evidence window difficult listen soon culture billion chance brother energy period
"""
_WORDS = tuple(_WORD_LIST.split())


class Vocabulary(Protocol):
    """Makes contents. The same seed and name give the same content in every process."""

    def content(self, name: str, token_count: int) -> Content:
        """Made-up content of about that many tokens; a longer one of the same name begins with a shorter one."""
        ...

    def read(self, text: str) -> Content:
        """Content of a text that somebody wrote; texts with a common beginning have contents with one."""
        ...

    def join(self, parts: Sequence[Content]) -> Content:
        """All parts, one after another."""
        ...

    def count(self, content: Content) -> int:
        """Tokens, estimated where content is text."""
        ...


def _numbers(seed: int, name: str, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """The first `count` of an endless row of numbers that seed and name define, on every machine alike."""
    stream = blake3(f"{seed}/{name}".encode()).digest(length=4 * count)
    return np.frombuffer(stream, dtype="<u4")


class IdVocabulary:
    """Token ids in [low, high)."""

    def __init__(self, seed: int, low: int, high: int) -> None:
        self._seed, self._low, self._span = seed, low, high - low

    def content(self, name: str, token_count: int) -> Content:
        ids: list[int] = (_numbers(self._seed, name, token_count) % self._span + self._low).tolist()
        return ids

    def read(self, text: str) -> Content:
        """One id for each four characters of a word, about as tokenizers cut; the ids mean nothing to a model."""
        pieces = (word[at : at + 4] for word in text.split() for at in range(0, len(word), 4))
        return [self._low + int.from_bytes(blake3(p.encode()).digest(length=4), "little") % self._span for p in pieces]

    def join(self, parts: Sequence[Content]) -> Content:
        return [token for part in parts for token in part if isinstance(token, int)]

    def count(self, content: Content) -> int:
        return len(content)


class WordVocabulary:
    """Common English words, about a token each."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def content(self, name: str, token_count: int) -> Content:
        return " ".join(_WORDS[number % len(_WORDS)] for number in _numbers(self._seed, name, token_count).tolist())

    def read(self, text: str) -> Content:
        return text

    def join(self, parts: Sequence[Content]) -> Content:
        return " ".join(part for part in parts if isinstance(part, str) and part)

    def count(self, content: Content) -> int:
        """Words for what we made; four characters a token are about the same for written text."""
        return max(1, len(content) // 5) if content else 0
