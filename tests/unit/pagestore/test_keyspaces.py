"""Whose a keyspace is, and how large its pages are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.core.errors import InvalidRequest, QuotaExceeded, TenantDenied
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool_pagestore.core import keyspaces as keyspaces_module
from kvpool_pagestore.core.admission import AdmissionPurpose, AdmissionRequest
from kvpool_pagestore.core.events import BytesHeld
from kvpool_pagestore.core.keyspaces import Keyspace, KeyspaceBook, check_page
from kvpool_pagestore.core.slots import PageRecord
from tests.fixtures.pagestore import KEYSPACE, PAGE_BYTES, SPEC, TENANT, metadata, page_key


def named(book: KeyspaceBook, number: int) -> Keyspace:
    spec = replace(SPEC, model_revision=str(number))
    return book.admit(TENANT, keyspace_id(encode_keyspace(TENANT, spec)), spec)


def known(book: KeyspaceBook) -> set[str]:
    return {one.spec.model_revision for one in book.all()}


def refusal(book: KeyspaceBook, keyspace: Keyspace) -> QuotaExceeded | None:
    record = PageRecord(page_key(1, keyspace=keyspace.keyspace), PAGE_BYTES, metadata(1))
    return book.refusal(AdmissionRequest(AdmissionPurpose.STORE, record, PAGE_BYTES))


def test_the_id_must_be_that_of_the_callers_tenant_and_spec() -> None:
    book = KeyspaceBook()
    assert book.admit(TENANT, KEYSPACE, SPEC).keyspace == KEYSPACE
    with pytest.raises(TenantDenied):
        book.admit("another", KEYSPACE, SPEC)
    with pytest.raises(TenantDenied):
        book.admit(TENANT, bytes(16), SPEC)
    theirs = keyspace_id(encode_keyspace("another", SPEC))
    book.admit("another", theirs, SPEC)
    assert [one.keyspace for one in book.of_tenant(TENANT)] == [KEYSPACE]


def test_a_keyspace_is_remembered_by_its_encoding_alone() -> None:
    book = KeyspaceBook()
    known = book.remember(encode_keyspace(TENANT, SPEC))
    assert (known.tenant, known.spec, known.keyspace) == (TENANT, SPEC, KEYSPACE)
    assert book.find(KEYSPACE) is known and book.admit(TENANT, KEYSPACE, SPEC) is known
    with pytest.raises(InvalidRequest):
        book.remember(b"garbage")


def test_a_page_has_exactly_the_size_of_its_shard() -> None:
    keyspace = KeyspaceBook().admit(TENANT, KEYSPACE, SPEC)
    check_page(keyspace, page_key(1), PAGE_BYTES)
    for key, size_bytes in ((page_key(1), PAGE_BYTES - 1), (page_key(1), 0), (page_key(1, shard=2), PAGE_BYTES)):
        with pytest.raises(InvalidRequest):
            check_page(keyspace, key, size_bytes)


def test_keyspaces_that_are_only_named_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyspaces_module, "USED_LAST_MAX", 10)
    book = KeyspaceBook()
    held, with_page = named(book, 0), named(book, 1).keyspace
    book.count(BytesHeld(with_page, 100))
    for number in range(2, 100):
        named(book, number)
    assert known(book) == {"0", "1", *map(str, range(90, 100))}
    assert book.find(held.keyspace) is held is named(book, 0) and book.find(with_page) is not None
    book.count(BytesHeld(with_page, -100))
    for number in range(100, 200):
        named(book, number)
    assert known(book) == {"0", *map(str, range(190, 200))} and book.find(with_page) is None


def test_a_keyspace_without_pages_stays_known_by_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyspaces_module, "USED_LAST_MAX", 2)
    book = KeyspaceBook()
    for number in (0, 1, 0, 2):
        named(book, number)
    assert known(book) == {"0", "2"}


def test_no_more_keyspaces_than_there_may_be_have_pages() -> None:
    book = KeyspaceBook(max_keyspaces=2)
    first, second, third = (named(book, number) for number in range(3))
    for one in (first, second):
        assert refusal(book, one) is None
        book.count(BytesHeld(one.keyspace, 5))
    assert refusal(book, first) is None and isinstance(refusal(book, third), QuotaExceeded)
    book.count(BytesHeld(first.keyspace, -5))
    assert refusal(book, third) is None
    assert refusal(book, book.admit("another", keyspace_id(encode_keyspace("another", SPEC)), SPEC)) is None
    book.count(BytesHeld(third.keyspace, 5))
    assert isinstance(refusal(book, first), QuotaExceeded)
    assert refusal(book, book.admit("another", keyspace_id(encode_keyspace("another", SPEC)), SPEC)) is None
