"""Text to token ids and back, for the demo's own tokenizer and for that of any Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_PATH = Path(__file__).resolve().parent / "tokenizer.json"
SPECIAL_TOKENS = ("<|bos|>", "<|user|>", "<|assistant|>", "<|end|>")  # ids 0 to 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMarkers:
    """The token ids that frame a conversation; each is put in as it is, never merged with the text around it."""

    begin: tuple[int, ...]  # before the document
    user: tuple[int, ...]  # before a question
    assistant: tuple[int, ...]  # before a reply
    end: tuple[int, ...]  # after a document, a question or a reply


class ChatTokenizer(Protocol):
    """What rendering a conversation needs of a tokenizer."""

    @property
    def markers(self) -> ChatMarkers: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; adds no special tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids; special tokens are left out."""


class CorpusTokenizer:
    """The committed byte-level BPE tokenizer (see train_tokenizer.py)."""

    def __init__(self, path: Path = TOKENIZER_PATH) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: tokenizers.Tokenizer = Tokenizer.from_file(str(path))
        # Text that happens to spell a marker stays text; otherwise a document could forge the frame around it.
        self._tokenizer.encode_special_tokens = True
        begin, user, assistant, end = ((self._special_token_id(token),) for token in SPECIAL_TOKENS)
        self._markers = ChatMarkers(begin=begin, user=user, assistant=assistant, end=end)

    @property
    def markers(self) -> ChatMarkers:
        return self._markers

    @property
    def vocabulary_size(self) -> int:
        """How many token ids there are; each is below this."""
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _special_token_id(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise ValueError(f"the tokenizer has no token {token}; train it again with python -m demo.train_tokenizer")
        return int(token_id)


class HubTokenizer:
    """The tokenizer of a Hugging Face model.

    Conversations are framed in plain text instead of the model's chat template: templates may rewrite earlier turns,
    and then a turn would no longer begin with the tokens of the one before it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        bos_id = tokenizer.bos_token_id
        self._markers = ChatMarkers(
            begin=() if bos_id is None else (int(bos_id),),
            user=tuple(self.encode("\n\nUser: ")),
            assistant=tuple(self.encode("\n\nAssistant: ")),
            end=(),
        )

    @property
    def markers(self) -> ChatMarkers:
        return self._markers

    def encode(self, text: str) -> list[int]:
        return [int(token_id) for token_id in self._tokenizer.encode(text, add_special_tokens=False)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
