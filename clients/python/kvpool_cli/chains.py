"""Token sequences on the command line, and the chunks that they are made of."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from kvpool.client.index import IndexClient, NamedKeyspace, OpenedKeyspace
from kvpool.core.chunks import chunk_hashes
from kvpool_cli.errors import CommandFailed, UsageFailed
from kvpool_cli.targets import keyspace_of_name

CHUNKS_A_CALL = 4096
"""Of Pin and Evict."""
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
        found = self.all()
        if len(found) != 1:
            raise UsageFailed("give one prompt: a FILE of token ids, or --text with --tokenizer or --server")
        return found[0]

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
        return [*found, _tokenized_by_server(self.server, text) if self.server else _tokenized(self.tokenizer, text)]


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


def _tokenized_by_server(url: str, text: str) -> list[int]:
    """By /tokenize of vLLM or SGLang, special tokens as for a completion."""
    body = json.dumps({"prompt": text}).encode()
    address = f"{url.rstrip('/').removesuffix('/v1')}/tokenize"
    try:
        request = Request(address, data=body, headers={"Content-Type": "application/json"})
        if request.type not in ("http", "https"):
            raise UsageFailed(f"--server {url} wants http:// or https://")
        with urlopen(request, timeout=_SERVER_TIMEOUT_S) as answer:
            document = json.loads(answer.read(_ANSWER_BYTES_MAX))
        return _checked(address, document["tokens"])
    except (URLError, HTTPException, OSError, ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"{address} does not tokenize: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The full chunks of a token sequence in one keyspace."""

    named: NamedKeyspace
    opened: OpenedKeyspace
    token_count: int
    hashes: tuple[bytes, ...]

    def batches(self, first_chunk: int = 0) -> Iterator[list[bytes]]:
        """Hashes from a chunk on, as many as one call may name."""
        for start in range(first_chunk, len(self.hashes), CHUNKS_A_CALL):
            yield list(self.hashes[start : start + CHUNKS_A_CALL])


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
        raise CommandFailed(f"{name}: {json.dumps(wrong)[:40]} is no token id (0 to 2**32 - 1)")
    return tokens


async def chain_of(index: IndexClient, keyspace_name: str, tokens: Sequence[int]) -> Chain:
    """The chunks of tokens. Raises CommandFailed for a keyspace that there is not, or without a full chunk."""
    named = await keyspace_of_name(index, keyspace_name)
    opened = await index.open_keyspace(named.name, named.spec)
    hashes = chunk_hashes(opened.hash_key, tokens, named.spec.chunk_tokens)
    if not hashes:
        raise CommandFailed(
            f"{len(tokens)} tokens are less than a chunk of {named.spec.chunk_tokens}: only full chunks are kept"
        )
    return Chain(named=named, opened=opened, token_count=len(tokens), hashes=tuple(hashes))
