"""What a cache did for one request, and what all requests of a process add up to."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.client.engine_items import TierTokens
from kvpool.client.hashing import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Prompt tokens by where their KV came from; they add up to the prompt."""

    own: int = 0  # the engine held them already
    staging: int = 0
    disk: int = 0
    remote: int = 0
    recomputed: int = 0

    @classmethod
    def of(cls, chain: Prompt, *, own_tokens: int, loaded: TierTokens) -> RequestStats:
        """Of one prompt. The last token always counts as recomputed, also when its chunk was loaded."""
        own = max(0, min(own_tokens, chain.token_count - 1))
        excess = max(0, own + loaded.total - max(0, chain.token_count - 1))
        counts = {"staging": loaded.staging, "disk": loaded.disk, "remote": loaded.remote}
        for source in ("remote", "disk", "staging"):  # the excess is at the end: most likely the slowest source's
            cut = min(excess, counts[source])
            counts[source] -= cut
            excess -= cut
        return cls(own=own, recomputed=chain.token_count - own - sum(counts.values()), **counts)

    @property
    def prompt(self) -> int:
        """All tokens of the prompt."""
        return self.own + self.staging + self.disk + self.remote + self.recomputed

    def __add__(self, other: RequestStats) -> RequestStats:
        return RequestStats(
            own=self.own + other.own,
            staging=self.staging + other.staging,
            disk=self.disk + other.disk,
            remote=self.remote + other.remote,
            recomputed=self.recomputed + other.recomputed,
        )
