"""What a page store keeps to when it loses the names of its pages: durable pages are there, cleared ones are not."""

from __future__ import annotations

from kvpool_pagestore.ports import PageStore
from tests.contract.page_store.pages import KEYSPACE, Durable, Reopen, get, key, page_write
from tests.fixtures.stored_pages import stored_pages


def put(store: PageStore, *numbers: int) -> None:
    durable = Durable()
    store.put_batch([page_write(number, b"page %d" % number) for number in numbers], durable)
    assert durable.calls == [(key(number), None) for number in numbers]


def test_pages_written_after_a_clear_and_a_restart_survive(reopen: Reopen, reopen_without_index: Reopen) -> None:
    store = reopen()
    put(store, *range(100))
    store.delete_keyspace(KEYSPACE)
    put(reopen(), *range(50))
    store = reopen_without_index()
    assert [number for number in range(100) if get(store, key(number)) == b"page %d" % number] == list(range(50))


def test_pages_deleted_before_a_restart_and_a_clear_stay_cleared(reopen: Reopen, reopen_without_index: Reopen) -> None:
    store = reopen()
    put(store, *range(200))
    store.delete_batch([key(number) for number in range(100, 200)])
    reopen().delete_keyspace(KEYSPACE)
    assert stored_pages(reopen_without_index()) == []


def test_the_index_may_be_lost_again_and_again(reopen: Reopen, reopen_without_index: Reopen) -> None:
    store = reopen()
    for start in range(0, 40, 10):
        put(store, *range(start, start + 10))
        store = reopen_without_index()
        put(store, start)
        store.delete_keyspace(KEYSPACE)
        put(store, start + 1)
        store = reopen_without_index()
        assert [page.metadata.chunk_index for page in stored_pages(store)] == [start + 1]
