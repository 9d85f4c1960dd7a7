"""Token sequences on the command line, and the chunks that they are made of."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpool.client.index import IndexClient, NamedKeyspace, OpenedKeyspace
from kvpool.core.chunks import chunk_hashes
from kvpool_cli.output import CommandFailed
from kvpool_cli.targets import keyspace_of_name

CHUNKS_A_CALL = 4096
"""Of Pin and Evict."""


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


def add_tokens(parser: argparse.ArgumentParser, *, nargs: str | None = None) -> None:
    """Declare the token file and the keyspace. nargs "?": the file may be left out."""
    text = "token ids as a JSON list or separated by blanks; - is stdin"
    parser.add_argument("tokens", metavar="FILE", help=text, **({} if nargs is None else {"nargs": nargs}))  # type: ignore[arg-type]
    parser.add_argument("--keyspace", default="", metavar="NAME", help="needed where there is more than one")


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
