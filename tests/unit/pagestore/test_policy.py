"""The one policy object: what is done with pages under each policy of node and keyspace."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool.core.policy import KeyspacePolicy, StagingMode, VersionedPolicy, WritePolicy
from kvpool_pagestore.core.policy import NodePolicy, PolicyBook, plan_of

NODE = NodePolicy()


def policy(write: WritePolicy = WritePolicy.DEFAULT, staging: StagingMode = StagingMode.DEFAULT) -> KeyspacePolicy:
    return KeyspacePolicy(write_policy=write, staging=staging)


def test_write_back_is_the_default_and_waits_for_nothing() -> None:
    plan = plan_of(NODE, policy())
    assert plan == plan_of(NODE, policy(WritePolicy.WRITE_BACK, StagingMode.CACHE))
    assert not plan.commit_waits
    assert plan.goes_to_disk(0, 0)
    assert plan.staging_is_tier and plan.stays_in_staging


def test_write_through_waits() -> None:
    plan = plan_of(NODE, policy(WritePolicy.WRITE_THROUGH))
    assert plan.commit_waits and plan.goes_to_disk(0, 0)


def test_staging_only_never_writes() -> None:
    plan = plan_of(NODE, policy(WritePolicy.STAGING_ONLY))
    assert not plan.goes_to_disk(10**9, 10**9)


@pytest.mark.parametrize(("uses", "tokens", "written"), [(0, 0, 0), (2, 99, 0), (3, 0, 1), (9, 0, 1), (0, 100, 1)])
def test_selective_writes_from_the_nth_use_or_for_a_long_prompt(uses: int, tokens: int, written: int) -> None:
    wanted = replace(policy(WritePolicy.SELECTIVE), selective_min_uses=3, selective_min_tokens=100)
    assert plan_of(NODE, wanted).goes_to_disk(uses, tokens) == bool(written)


def test_selective_takes_the_numbers_of_the_node_where_the_keyspace_says_none() -> None:
    node = replace(NODE, selective_min_uses=5, selective_min_tokens=7)
    plan = plan_of(node, policy(WritePolicy.SELECTIVE))
    assert (plan.write_at_uses, plan.write_at_tokens) == (5, 7)


@pytest.mark.parametrize("write", [WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH])
def test_transit_neither_matches_nor_keeps(write: WritePolicy) -> None:
    plan = plan_of(NODE, policy(write, StagingMode.TRANSIT))
    assert not plan.staging_is_tier and not plan.stays_in_staging
    assert plan.goes_to_disk(0, 0)


@pytest.mark.parametrize("write", [WritePolicy.STAGING_ONLY, WritePolicy.SELECTIVE])
def test_a_node_whose_pages_would_be_nowhere_is_refused(write: WritePolicy) -> None:
    with pytest.raises(InvalidRequest, match="neither tier"):
        NodePolicy(write_policy=write, staging=StagingMode.TRANSIT)


def test_whatever_node_and_keyspace_say_a_page_is_somewhere() -> None:
    """A keyspace's word and the node's may make a pair that neither would be allowed alone."""
    for node_write, node_staging, write, staging, has_disk in product(
        WritePolicy, StagingMode, WritePolicy, StagingMode, (True, False)
    ):
        try:
            node = NodePolicy(write_policy=node_write, staging=node_staging, has_disk=has_disk)
            policy(write, staging).check()
        except InvalidRequest:
            continue
        plan = plan_of(node, policy(write, staging))
        assert plan.stays_in_staging or plan.goes_to_disk(0, 0)
        assert has_disk or not plan.goes_to_disk(10**9, 10**9)


def test_a_node_without_disk_says_so_to_who_wants_durability() -> None:
    plan = plan_of(replace(NODE, has_disk=False), policy(WritePolicy.WRITE_THROUGH))
    assert plan.commit_waits and not plan.goes_to_disk(0, 0)


def test_the_newest_word_counts_and_a_withdrawn_policy_is_the_nodes_again() -> None:
    book, keyspace = PolicyBook(NODE), b"k" * 16
    only = policy(WritePolicy.STAGING_ONLY)
    assert book.take(VersionedPolicy(keyspace=keyspace, policy=only, version=5))
    assert not book.take(VersionedPolicy(keyspace=keyspace, policy=policy(), version=5))
    assert book.plan(keyspace).write_at_uses is None
    assert book.plan(b"o" * 16) == plan_of(NODE, policy())
    assert [one.policy for one in book.known()] == [only]
    assert book.take(VersionedPolicy(keyspace=keyspace, policy=policy(), version=6))
    assert book.plan(keyspace) == plan_of(NODE, policy())
