"""What every page store owes its on_durable callback: one word about each page, after the sync or with the failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvpool.core.errors import KvPoolError, StoreFault
from kvpool.core.page import PageKey
from kvpool_pagestore.ports import PageStore, PageWrite
from tests.contract.page_store.pages import Durable, Reopen, get, key, metadata, now_and_after_restart, page_write
from tests.fixtures.stored_pages import stored_pages

Failing = Callable[[], AbstractContextManager[None]]


def test_each_page_is_reported_once_from_the_writing_thread_before_the_batch_returns(store: PageStore) -> None:
    reported: list[tuple[PageKey, KvPoolError | None, int]] = []
    pages = [page_write(number, bytes([number]) * 70_000) for number in range(5)]
    store.put_batch(pages, lambda page_key, error: reported.append((page_key, error, threading.get_ident())))
    assert sorted(reported) == [(key(number), None, threading.get_ident()) for number in range(5)]


def test_a_reported_page_is_found_at_once(store: PageStore) -> None:
    found: list[bytes | None] = []
    pages = [page_write(number, bytes([number]) * 5000) for number in range(3)]
    store.put_batch(pages, lambda page_key, error: found.append(get(store, page_key)))
    assert sorted(page or b"" for page in found) == [bytes([number]) * 5000 for number in range(3)]


def test_a_failure_is_reported_once_for_each_page_and_nothing_is_found(reopen: Reopen, failing_disk: Failing) -> None:
    store, durable = reopen(), Durable()
    store.put_batch([page_write(1, b"before" * 1000)], Durable())
    with failing_disk():
        store.put_batch([page_write(2, b"two" * 1000), page_write(3, b"three" * 1000)], durable)
    assert [(page_key, type(error)) for page_key, error in durable.calls] == [
        (key(2), StoreFault),
        (key(3), StoreFault),
    ]
    for current in now_and_after_restart(store, reopen):
        assert [get(current, key(number)) for number in (1, 2, 3)] == [b"before" * 1000, None, None]


def test_a_key_named_twice_is_reported_twice_with_the_same_result(reopen: Reopen, failing_disk: Failing) -> None:
    store, durable = reopen(), Durable()
    batch = [page_write(1, b"first"), page_write(2, b"other"), page_write(1, b"last")]
    with failing_disk():
        store.put_batch(batch, durable)
    store.put_batch(batch, durable)
    words = [(page_key, error is None) for page_key, error in durable.calls]
    assert sorted(words[:3]) == [(key(1), False), (key(1), False), (key(2), False)]
    assert sorted(words[3:]) == [(key(1), True), (key(1), True), (key(2), True)]
    assert get(store, key(1)) == b"last"


def test_the_next_write_is_reported_on_its_own(reopen: Reopen, failing_disk: Failing) -> None:
    """A failure must not stick to the store: what the next sync covers is durable."""
    store, durable = reopen(), Durable()
    with failing_disk():
        store.put_batch([page_write(1, b"x" * 9000)], Durable())
    store.put_batch([page_write(1, b"y" * 9000)], durable)
    assert durable.calls == [(key(1), None)]
    assert get(reopen(), key(1)) == b"y" * 9000


def test_other_metadata_is_kept_beside_the_same_bytes(reopen: Reopen) -> None:
    store = reopen()
    store.put_batch([page_write(number, bytes([number]) * 4000) for number in range(3)], Durable())
    store.set_metadata([(key(1), metadata(77)), (key(9), metadata(78))])
    for current in now_and_after_restart(store, reopen):
        kept = {page.key: page.metadata for page in stored_pages(current)}
        assert kept == {key(0): metadata(0), key(1): metadata(77), key(2): metadata(2)}
        assert get(current, key(1)) == bytes([1]) * 4000


def test_other_metadata_outlives_the_moving_of_its_page(reopen: Reopen) -> None:
    """Space is given back by moving what lives: the page must not fall back to what was kept with it at first."""
    store, size_bytes = reopen(), 200_000
    for number in range(20):
        store.put_batch(
            [PageWrite(key=key(number), page=memoryview(bytes(size_bytes)), metadata=metadata(0))], Durable()
        )
        store.set_metadata([(key(number), metadata(number))])
    store.delete_batch([key(number) for number in range(20) if number % 5])
    for number in range(20, 40):
        store.put_batch([page_write(number, bytes(size_bytes))], Durable())
    kept = {page.key: page.metadata for page in stored_pages(reopen())}
    assert kept == {key(number): metadata(number) for number in (0, 5, 10, 15, *range(20, 40))}
