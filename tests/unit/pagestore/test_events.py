"""Events reach all subscribers, in the order of the one list; rules of admission are asked in the order of theirs."""

from __future__ import annotations

import pytest

from kvpool.core.errors import Draining, KvPoolError, QuotaExceeded
from kvpool.core.outcome import Tier
from kvpool_pagestore.core.admission import AdmissionPurpose, AdmissionRequest, AdmissionRule, AdmissionRules
from kvpool_pagestore.core.events import BytesHeld, PageEvents, PagesEvicted, PagesLeft, StagingChanged, Subscription
from kvpool_pagestore.core.slots import PageRecord
from tests.fixtures.pagestore import KEYSPACE, metadata, page_key

REQUEST = AdmissionRequest(AdmissionPurpose.STORE, PageRecord(page_key(1), 100, metadata(1)), 4096)


def test_subscribers_of_one_kind_are_called_in_the_order_of_the_list() -> None:
    seen: list[str] = []
    events = PageEvents()
    events.publish(BytesHeld(KEYSPACE, 1))
    events.subscribe(
        [
            Subscription(BytesHeld, lambda held: seen.append(f"first {held.size_bytes}")),
            Subscription(PagesEvicted, lambda evicted: seen.append(evicted.tier.name)),
            Subscription(BytesHeld, lambda held: seen.append("second")),
        ]
    )
    events.publish(BytesHeld(KEYSPACE, 7))
    events.publish(PagesEvicted(Tier.DISK, 1))
    assert seen == ["first 7", "second", "DISK"]


def test_there_is_one_list_of_subscribers_and_one_of_rules() -> None:
    events, rules = PageEvents(), AdmissionRules()
    events.subscribe([Subscription(BytesHeld, lambda held: None)])
    rules.set_rules((lambda request: None,))
    with pytest.raises(RuntimeError, match="add to that list"):
        events.subscribe([Subscription(BytesHeld, lambda held: None)])
    with pytest.raises(RuntimeError, match="add to that list"):
        rules.set_rules((lambda request: None,))


def test_the_first_rule_that_refuses_ends_the_asking() -> None:
    asked: list[str] = []

    def rule(name: str, answer: KvPoolError | None) -> AdmissionRule:
        def ask(request: AdmissionRequest) -> KvPoolError | None:
            assert request is REQUEST
            asked.append(name)
            return answer

        return ask

    rules = AdmissionRules()
    assert rules.refusal(REQUEST) is None
    rules.set_rules((rule("a", None), rule("b", Draining("b")), rule("c", QuotaExceeded("c"))))
    assert isinstance(rules.refusal(REQUEST), Draining) and asked == ["a", "b"]


def test_a_handler_that_fails_keeps_no_merged_event_from_others() -> None:
    events, seen = PageEvents(), list[object]()

    def fail(changed: StagingChanged) -> None:
        raise RuntimeError("planted")

    events.subscribe(
        [
            Subscription(StagingChanged, fail),
            Subscription(PagesLeft, lambda left: seen.extend(left.keys)),
            Subscription(PagesEvicted, lambda evicted: seen.append(evicted.page_count)),
        ]
    )
    record = PageRecord(page_key(1), 4096, metadata(1))
    with pytest.raises(RuntimeError, match="planted"), events.merged():
        events.publish(PagesLeft((page_key(1),)))
        events.publish(PagesEvicted(Tier.STAGING, 1))
        events.publish(StagingChanged((record,), False))
    assert seen == [page_key(1), 1]
    events.publish(PagesLeft((page_key(2),)))
    assert seen == [page_key(1), 1, page_key(2)]
