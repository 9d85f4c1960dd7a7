"""What becomes of a page: the one place that decides about disk writes, staging as a tier, and what stays in memory.

Nothing else of the pagestore asks for a write policy or a staging mode; it asks the `PagePlan` of the page's keyspace.

| | answers | page bytes on disk | in staging afterwards |
|---|---|---|---|
| write-back | when staged | soon after; while the disk is behind, when it has caught up | until evicted |
| write-through | when durable, or with why not | before the answer | until evicted |
| selective | when staged | from the n-th use, or soon after if the prompt was long | until evicted, durable or not |
| staging-only | when staged | never | until evicted |
| transit (with the first two) | as above | as above | nothing, once durable and unread; not announced |

A node without a disk tier makes nothing durable: commits under write-through say so, everything else stays in staging.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.core.policy import KeyspacePolicy, StagingMode, VersionedPolicy, WritePolicy, check_combination


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePolicy:
    """What the node does with keyspaces that say nothing themselves. Raises InvalidRequest for what cannot be."""

    write_policy: WritePolicy = WritePolicy.WRITE_BACK
    staging: StagingMode = StagingMode.CACHE
    selective_min_uses: int = 2
    selective_min_tokens: int = 2048
    has_disk: bool = True

    def __post_init__(self) -> None:
        check_combination(self.write_policy, self.staging)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """What is done with the pages of one keyspace.

    commit_waits:     a commit answers only when its pages are durable, or with why they are not.
    staging_is_tier:  staged pages are announced to the index.
    stays_in_staging: a page that is not in use stays in its slot after its disk write, a disk read or a pull; else the
                      slot is free as soon as the page is durable and its last lease has ended.
    write_at_uses:    uses from which a page goes to disk; 0: with its commit; None: never.
    write_at_tokens:  prompt tokens from which it goes to disk with its commit whatever its uses; None: no such length.
    """

    commit_waits: bool
    staging_is_tier: bool
    stays_in_staging: bool
    write_at_uses: int | None
    write_at_tokens: int | None

    def goes_by_use(self, uses: int) -> bool:
        """Whether this use takes a page to disk that was staged without being written."""
        return self.write_at_uses is not None and 0 < self.write_at_uses <= uses

    def goes_to_disk(self, uses: int, prompt_tokens: int) -> bool:
        """Whether a page that is not durable should be by now. uses: 0 at its commit; prompt_tokens: 0 if unknown."""
        if self.write_at_uses is not None and uses >= self.write_at_uses:
            return True
        return self.write_at_tokens is not None and prompt_tokens >= self.write_at_tokens


_NO_WISHES = KeyspacePolicy()


class PolicyBook:
    """The node's defaults and what it learned of keyspaces. Use from one thread only."""

    def __init__(self, node: NodePolicy) -> None:
        self._node = node
        self._policies: dict[bytes, VersionedPolicy] = {}
        self._plans: dict[bytes, PagePlan] = {}
        self._default = plan_of(node, KeyspacePolicy())

    def plan(self, keyspace: bytes) -> PagePlan:
        """What is done with the pages of a keyspace."""
        return self._plans.get(keyspace, self._default)

    def policy(self, keyspace: bytes) -> KeyspacePolicy:
        """Return the policy of a keyspace; all defaults if none is known."""
        learned = self._policies.get(keyspace)
        return learned.policy if learned is not None else _NO_WISHES

    def versioned(self, keyspace: bytes) -> VersionedPolicy | None:
        """Return the policy of a keyspace with its version; None if none is known."""
        return self._policies.get(keyspace)

    def known(self) -> list[VersionedPolicy]:
        """Return all policies that are known, by keyspace."""
        return [self._policies[keyspace] for keyspace in sorted(self._policies)]

    def take(self, learned: VersionedPolicy) -> bool:
        """Take a policy over unless a newer one is known. Return whether it was taken."""
        known = self._policies.get(learned.keyspace)
        if known is not None and known.version >= learned.version:
            return False
        self._policies[learned.keyspace] = learned
        self._plans[learned.keyspace] = plan_of(self._node, learned.policy)
        return True


def plan_of(node: NodePolicy, policy: KeyspacePolicy) -> PagePlan:
    """What a node does with the pages of a keyspace. A keyspace's word counts, but two of them that cannot go together
    (one of them the node's) leave staging a cache: pages must be somewhere."""
    write = policy.write_policy or node.write_policy
    transit = (policy.staging or node.staging) is StagingMode.TRANSIT and node.has_disk
    durable = node.has_disk and write is not WritePolicy.STAGING_ONLY
    selective = write is WritePolicy.SELECTIVE
    if selective or not durable:
        transit = False
    return PagePlan(
        commit_waits=write is WritePolicy.WRITE_THROUGH,
        staging_is_tier=not transit,
        stays_in_staging=not transit,
        write_at_uses=None if not durable else (policy.selective_min_uses or node.selective_min_uses) * selective,
        write_at_tokens=(policy.selective_min_tokens or node.selective_min_tokens) if durable and selective else None,
    )
