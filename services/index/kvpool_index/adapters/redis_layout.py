"""Which layout the keys of a prefix have: a mark beside them, so that no release takes those of another for its own.

The mark is asked for on every connection, because a failover may lead to a Redis of others, and set again about once a
second, because FLUSHALL takes it away. It lies in the slot of the node records: what loses them loses it too.
"""

from __future__ import annotations

from typing import Final

from kvpool.core.errors import StartupFailed
from kvpool_index.adapters.redis_wire import Reply, is_error, pack

LAYOUT: Final = 3
"""Counted up when keys of the same names come to mean something else to whoever reads or changes them."""

_SHOWN_CHARS: Final = 32


class RedisLayout:
    """What the mark of a deployment was seen to be. Keys without a mark have the layout of whoever marks them."""

    def __init__(self, key_prefix: str, layout: int = LAYOUT) -> None:
        self._prefix = key_prefix
        self._layout = b"%d" % layout
        self.key = key_prefix.encode() + b":{n}:layout"
        self._refusal = ""

    def question(self) -> bytes:
        """A command whose reply `take` understands."""
        return pack(b"GET", self.key)

    def claim(self) -> list[bytes]:
        """Commands that set the mark if there is none; of two at once one is first. `take` the last reply."""
        return [pack(b"SET", self.key, self._layout, b"NX"), self.question()]

    def take(self, reply: Reply) -> None:
        """Note what the mark is; raises ConnectionError for that of another layout.

        An error is no mark: another member of the Cluster has it, or the server is loading.
        """
        if reply is None or is_error(reply):
            return
        self._refusal = self._refuse(reply) if reply != self._layout else ""
        if self._refusal:
            raise ConnectionError(self._refusal)

    def check(self) -> None:
        """Raise StartupFailed if the mark that was seen last is of another layout."""
        if self._refusal:
            raise StartupFailed(self._refusal)

    def _refuse(self, found: bytes) -> str:
        shown = ascii(found[:_SHOWN_CHARS].decode("latin-1"))
        ours = self._layout.decode()
        return (
            f"the keys {self._prefix}:* in Redis have layout {shown}, and this release has layout '{ours}': run "
            "the release that wrote them, or give this one a redis_key_prefix of its own, or stop all index replicas "
            "of the other and delete its keys (docs/upgrades.md, 'Deleting the keys of a prefix'); nodes tell the "
            "index again what they hold"
        )
