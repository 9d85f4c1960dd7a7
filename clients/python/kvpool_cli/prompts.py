"""Prompts as the command line names them: files of token ids, or a text and what tokenizes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool_cli.errors import CommandFailed, UsageFailed

_SERVER_TIMEOUT_S = 30.0
_ANSWER_BYTES_MAX = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSource:
    """Where a command's tokens come from: files of token ids, or a text and what tokenizes it."""

    tokens: Sequence[str] = ()
    text: str = ""
    tokenizer: str = ""
    server: str = ""

    def __bool__(self) -> bool:
        return bool(self.tokens or self.text)

    def __str__(self) -> str:
        return ", ".join(self.tokens) or "--text"

    def one(self) -> list[int]:
        """The tokens of one prompt. Raises CommandFailed."""
        if len(self.tokens) + bool(self.text) != 1:
            raise UsageFailed("give one prompt: a FILE of token ids, or --text with --tokenizer or --server")
        return self.all()[0]

    def all(self) -> list[list[int]]:
        """The tokens of each prompt. Raises CommandFailed."""
        found = [read_tokens(name) for name in self.tokens]
        if not self.text:
            if self.tokenizer or self.server:
                raise UsageFailed("--tokenizer and --server need --text")
            return found
        if bool(self.tokenizer) == bool(self.server):
            raise UsageFailed("--text needs --tokenizer or --server, and not both")
        text = _text_of(self.text)
        return [*found, tokenized_by_server(self.server, text) if self.server else _tokenized(self.tokenizer, text)]


def _text_of(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{text[1:]} cannot be read: {error}") from error


def _tokenized(name: str, text: str) -> list[int]:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CommandFailed(
            "--tokenizer needs the package tokenizers: pip install tokenizers, or give --server"
        ) from error
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer: Any = Tokenizer.from_file(str(file)) if file.exists() else Tokenizer.from_pretrained(name)
    except Exception as error:  # what the package raises has no class of its own
        raise CommandFailed(f"tokenizer {name} cannot be loaded: {error}") from error
    return list(tokenizer.encode(text).ids)


def tokenized_by_server(url: str, text: str, api_key: str = "") -> list[int]:
    """By /tokenize of vLLM or SGLang, special tokens as for a completion."""
    from kvpool_cli.server_calls import fetch

    if not url.lower().startswith(("http://", "https://")):
        raise UsageFailed(f"--server {url} wants http:// or https://")
    address = f"{url.rstrip('/').removesuffix('/v1')}/tokenize"
    body = {"prompt": text}
    try:
        answer = fetch(address, body, api_key=api_key, timeout_s=_SERVER_TIMEOUT_S, size_bytes_max=_ANSWER_BYTES_MAX)
        return _checked(address, json.loads(answer)["tokens"])
    except CommandFailed as error:
        raise CommandFailed(f"{error}; name a vLLM or SGLang server that runs") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"{address} does not tokenize ({error}); name a vLLM or SGLang server that runs") from error


def read_tokens(name: str) -> list[int]:
    """Token ids of a file, or of stdin. Raises CommandFailed."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{name} cannot be read: {error}") from error
    try:
        tokens = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"{name} is neither a JSON list nor integers separated by blanks: {error}") from error
    return _checked(name, tokens)


def _checked(name: str, tokens: Any) -> list[int]:
    if not isinstance(tokens, list):
        raise CommandFailed(f"{name} has no list of token ids")
    wrong = next((token for token in tokens if type(token) is not int or not 0 <= token < 1 << 32), None)
    if wrong is not None:
        raise CommandFailed(f"{name}: {json.dumps(wrong)[:40]} is not a token id (0 to 2**32 - 1)")
    return tokens
