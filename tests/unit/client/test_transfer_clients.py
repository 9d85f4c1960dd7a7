"""Connections to many endpoints: few are kept, and none is closed under a call."""

from __future__ import annotations

import pytest

from kvpool.client import transfer
from kvpool.client.transfer import PageTransferClients


class Client:
    """Stands for a PageTransferClient."""

    def __init__(self, endpoint: str, **_: object) -> None:
        self.endpoint, self.closed = endpoint, False

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PageTransferClient", Client)


def test_what_a_call_uses_stays_open_and_unused_ones_go_the_least_recent_first() -> None:
    clients = PageTransferClients(clients_max=2)
    with clients.client("a:1") as used:
        with clients.client("b:1") as first:
            pass
        with clients.client("c:1") as second:
            pass
        assert (used.closed, first.closed, second.closed) == (False, True, False)  # type: ignore[attr-defined]
        with clients.client("a:1") as again:
            assert again is used
    clients.close()
    assert used.closed  # type: ignore[attr-defined]
    with clients.client("d:1") as late:
        assert late.closed  # type: ignore[attr-defined]
