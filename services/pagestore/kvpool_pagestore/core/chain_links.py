"""Where a chunk stands in eviction: after the chunk before it, or alone. Pure.

Layers with full attention need all chunks before a boundary of a prompt, so a chunk is worth nothing without those
before it. Layers with a window in a model with other layers need those that the window reaches, recurrent layers one
state: their chunks stand alone. Of a window's, those far before the end of their prompt are wanted only by another
prompt that parts from it near them: they are stored, and go first unless one does. What that brings in replays of
traces is in docs/pagestore.md (`python -m bench.window_eviction`). States are never passed: ranking
those inside of prompts that way finds less in most replays (`python -m bench.state_eviction`). No chunk keeps one of
another group of its model: hashes are keyed with the keyspace, so which chunks are of one boundary is not known here.
"""

from __future__ import annotations

from typing import NamedTuple

from kvpool.core.cluster import PageMetadata
from kvpool.core.geometry import AttentionKind
from kvpool_pagestore.core.keyspaces import KeyspaceBook

KEPT_WINDOWS = 2  # before the end of a prompt: one that is read, and one for prompts that end in other words
_IN_CHAIN, _NEVER_PASSED = -1, 0  # in place of tokens that are kept


class ChainLink(NamedTuple):
    """parent: hash of the chunk that stays as long as this one does; None if no chunk has to. is_passed: its prompt
    goes on so far behind it that it is not expected to be asked for."""

    parent: bytes | None
    is_passed: bool


class ChainLinks:
    """Which chunks of a node's keyspaces keep others, by what their attention needs."""

    def __init__(self, keyspaces: KeyspaceBook) -> None:
        self._keyspaces = keyspaces
        # By keyspace: tokens of a chunk and its pages, and tokens before the end of a prompt.
        self._kept: dict[bytes, tuple[int, int, int]] = {}

    def stand_alone(self, keyspace: bytes) -> bool:
        """Return whether no chunk of a keyspace keeps another one."""
        return self._numbers(keyspace)[2] != _IN_CHAIN

    def find(self, keyspace: bytes, metadata: PageMetadata) -> ChainLink:
        """Return what a chunk keeps: the one before it if the keyspace is not known."""
        chunk_tokens, pages, kept_tokens = self._numbers(keyspace)
        if kept_tokens == _IN_CHAIN:
            return ChainLink(metadata.parent_hash if metadata.chunk_index else None, False)
        end_tokens = (metadata.chunk_index // pages + 1) * chunk_tokens
        return ChainLink(None, kept_tokens != _NEVER_PASSED and end_tokens + kept_tokens <= metadata.prompt_tokens)

    def _numbers(self, keyspace: bytes) -> tuple[int, int, int]:
        known = self._kept.get(keyspace)
        if known is None:
            found = self._keyspaces.find(keyspace)
            if found is None:
                return 1, 1, _IN_CHAIN
            group, kept_tokens = found.spec.group, _IN_CHAIN
            if group.attention is AttentionKind.GROUPED_WINDOW:
                kept_tokens = KEPT_WINDOWS * group.window_tokens
            elif group.attention is AttentionKind.STATE_SPACE:
                kept_tokens = _NEVER_PASSED
            known = self._kept[keyspace] = found.spec.chunk_tokens, group.pages, kept_tokens
        return known


ALL_IN_CHAINS = ChainLinks(KeyspaceBook())
"""Of which no keyspace is known: all chunks are in chains."""
