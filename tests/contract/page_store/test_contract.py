"""What every PageStore promises."""

from __future__ import annotations

import os

import pytest

from kvpool.core.errors import PageCorrupt
from kvpool_pagestore.core.stored_pages import StoredPage
from kvpool_pagestore.ports import PageStore, PageWrite
from tests.contract.page_store.pages import (
    KEYSPACE,
    OTHER,
    Durable,
    Reopen,
    get,
    key,
    metadata,
    now_and_after_restart,
    page_write,
)
from tests.fixtures.stored_pages import stored_pages


def test_an_empty_store_has_nothing(store: PageStore) -> None:
    assert stored_pages(store) == []
    assert list(store.keyspaces()) == []
    assert store.load_value("incarnation") is None
    assert get(store, key(1)) is None
    store.put_batch([], Durable())
    store.delete_batch([key(1)])
    store.delete_keyspace(KEYSPACE)


@pytest.mark.parametrize("size_bytes", [1, 100, 4096, 65_537, 700_000])
def test_pages_come_back_bit_for_bit_after_a_restart(reopen: Reopen, size_bytes: int) -> None:
    pages = {number: os.urandom(size_bytes) for number in range(5)}
    durable = Durable()
    reopen().put_batch([page_write(number, page) for number, page in pages.items()], durable)
    assert sorted(durable.calls) == [(key(number), None) for number in pages]
    again = reopen()
    assert {number: get(again, key(number)) for number in pages} == pages
    found = sorted(stored_pages(again), key=lambda page: page.key.chunk_hash)
    assert found == [StoredPage(key(n), size_bytes, metadata(n)) for n in pages]


def test_a_page_is_written_into_the_slot_and_nowhere_else(store: PageStore) -> None:
    store.put_batch([page_write(1, b"x" * 100)], Durable())
    slot = bytearray(b"." * 300)
    assert store.get_into(key(1), memoryview(slot)[50:250]) == 100
    assert slot == b"." * 50 + b"x" * 100 + b"." * 150


def test_a_page_that_does_not_fit_its_slot_is_damage_and_touches_nothing(store: PageStore) -> None:
    store.put_batch([page_write(1, b"x" * 100)], Durable())
    slot = bytearray(99)
    with pytest.raises(PageCorrupt):
        store.get_into(key(1), memoryview(slot))
    assert slot == bytearray(99)


def test_the_page_may_change_once_the_batch_has_returned(store: PageStore) -> None:
    slot = bytearray(b"a" * 1000)
    store.put_batch([PageWrite(key=key(1), page=memoryview(slot), metadata=metadata(1))], Durable())
    slot[:] = b"b" * 1000
    assert get(store, key(1)) == b"a" * 1000


def test_a_page_written_again_replaces_the_old_one(reopen: Reopen) -> None:
    store = reopen()
    store.put_batch([page_write(1, b"old" * 50)], Durable())
    store.put_batch([page_write(1, b"new")], Durable())
    assert get(store, key(1)) == b"new"
    again = reopen()
    assert get(again, key(1)) == b"new"
    assert [page.page_bytes for page in stored_pages(again)] == [3]


def test_a_key_twice_in_a_batch_is_one_page_and_two_callbacks(store: PageStore) -> None:
    durable = Durable()
    store.put_batch([page_write(1, b"first"), page_write(1, b"last")], durable)
    assert durable.calls == [(key(1), None), (key(1), None)]
    assert get(store, key(1)) == b"last"


def test_deleted_pages_are_gone_and_stay_gone(reopen: Reopen) -> None:
    store = reopen()
    store.put_batch([page_write(number, b"page") for number in range(10)], Durable())
    store.delete_batch([key(number) for number in (2, 3, 77)])
    left = {0, 1, 4, 5, 6, 7, 8, 9}
    for current in now_and_after_restart(store, reopen):
        assert {page.metadata.chunk_index for page in stored_pages(current)} == left
        assert get(current, key(2)) is None
        assert get(current, key(4)) == b"page"


def test_deleting_a_keyspace_leaves_the_others(reopen: Reopen) -> None:
    store = reopen()
    for keyspace in (b"j" * 16, KEYSPACE, b"k" * 15 + b"l", OTHER):
        store.put_batch([page_write(number, b"page", keyspace) for number in range(4)], Durable())
    store.delete_keyspace(KEYSPACE)
    store.delete_keyspace(OTHER)
    for current in now_and_after_restart(store, reopen):
        assert {page.key.keyspace for page in stored_pages(current)} == {b"j" * 16, b"k" * 15 + b"l"}
        assert get(current, key(1)) is None
        assert get(current, key(1, b"j" * 16)) == b"page"


def test_keyspaces_and_values_survive_a_restart(reopen: Reopen) -> None:
    store = reopen()
    for encoding in (b"\x00one", b"two" * 100, b"\x00one"):
        store.remember_keyspace(encoding)
    store.save_value("incarnation", b"1")
    store.save_value("incarnation", b"2")
    store.save_value("keyspace:x", b"no keyspace")
    again = reopen()
    assert sorted(again.keyspaces()) == [b"\x00one", b"two" * 100]
    assert again.load_value("incarnation") == b"2"
    assert again.load_value("keyspace:x") == b"no keyspace"
    assert again.load_value("other") is None


def test_the_space_of_deleted_pages_is_used_again(store: PageStore) -> None:
    page = os.urandom(256 << 10)
    numbers = list(range(40))
    store.put_batch([page_write(number, page) for number in numbers], Durable())
    first_bytes = store.used_bytes()
    assert first_bytes >= 40 * len(page)
    for start in range(40, 400, 36):
        store.delete_batch([key(number) for number in numbers if number % 10])
        numbers = [number for number in numbers if not number % 10][-4:] + list(range(start, start + 36))
        for number in range(start, start + 36):
            store.put_batch([page_write(number, page)], Durable())
        store.delete_batch([key(number) for number in range(start) if number not in numbers])
    assert store.used_bytes() <= first_bytes + (5 << 20)
    assert [number for number in range(400) if get(store, key(number)) == page] == sorted(numbers)


def test_closing_twice_is_fine(store: PageStore) -> None:
    store.close()
    store.close()
