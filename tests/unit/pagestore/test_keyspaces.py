"""Whose a keyspace is, and how large its pages are."""

from __future__ import annotations

import pytest

from kvpool.core.errors import InvalidRequest, TenantDenied
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool_pagestore.core.keyspaces import KeyspaceBook, check_page
from tests.fixtures.pagestore import KEYSPACE, PAGE_BYTES, SPEC, TENANT, page_key


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
