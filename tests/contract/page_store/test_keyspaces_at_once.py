"""A keyspace that several writers meet at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from tests.contract.page_store.pages import Reopen
from tests.fixtures.patience import PATIENCE_S


def test_a_keyspace_may_be_remembered_by_several_writers_at_once(reopen: Reopen) -> None:
    store = reopen()
    writers = 4
    for number in range(20):
        encoding = b"keyspace %d" % number
        together = Barrier(writers)

        def remember(encoding: bytes = encoding, together: Barrier = together) -> None:
            together.wait(PATIENCE_S)
            store.remember_keyspace(encoding)

        with ThreadPoolExecutor(writers) as pool:
            for done in [pool.submit(remember) for _ in range(writers)]:
                done.result(PATIENCE_S)
    assert len(set(reopen().keyspaces())) == 20
