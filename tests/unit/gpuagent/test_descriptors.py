"""Descriptors that engines offer: matched by token, owned by exactly one."""

import asyncio
import os
import re

import pytest

from kvpool.core.errors import InvalidRequest
from kvpool_gpuagent.engine.descriptors import FdExchange
from kvpool_server.fds import PeerCredentials

PEER = PeerCredentials(pid=1, uid=0, gid=0)


def make_descriptor() -> int:
    return os.memfd_create("offer")


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


async def test_descriptors_are_taken_in_handle_order() -> None:
    desk = FdExchange()
    inbox = desk.open([10, 20])
    first, second = make_descriptor(), make_descriptor()
    waiting = asyncio.ensure_future(inbox.wait(5.0))
    desk.on_offer(PEER, inbox.token, 1, 20, second)
    desk.on_offer(PEER, inbox.token, 0, 10, first)
    await waiting
    assert inbox.take() == [first, second]
    assert inbox.process == "process 1"
    desk.drop(inbox)
    assert is_open(first)  # the taker's
    os.close(first)
    os.close(second)


@pytest.mark.parametrize(
    ("handle", "size_bytes", "named"),
    [(2, 10, "handle 2 is not awaited; 2 were registered"), (1, 10, "handle 1 was registered with 20 bytes")],
)
async def test_what_nobody_asked_for_stays_the_offerers(handle: int, size_bytes: int, named: str) -> None:
    desk = FdExchange()
    inbox = desk.open([10, 20])
    descriptor = make_descriptor()
    with pytest.raises(InvalidRequest, match=re.escape(named)):
        desk.on_offer(PEER, inbox.token, handle, size_bytes, descriptor)
    desk.drop(inbox)
    assert is_open(descriptor)
    os.close(descriptor)


async def test_a_handle_is_offered_once() -> None:
    desk = FdExchange()
    inbox = desk.open([10, 20])
    first, again = make_descriptor(), make_descriptor()
    desk.on_offer(PEER, inbox.token, 0, 10, first)
    with pytest.raises(InvalidRequest, match="not awaited"):
        desk.on_offer(PEER, inbox.token, 0, 10, again)
    desk.drop(inbox)
    assert not is_open(first)  # it was taken over, and nobody came for it
    os.close(again)


async def test_a_wrong_or_old_token_is_refused() -> None:
    desk = FdExchange()
    inbox = desk.open([10])
    desk.drop(inbox)
    for token in (inbox.token, b"t" * 32):
        with pytest.raises(InvalidRequest, match="no session waits"):
            desk.on_offer(PEER, token, 0, 10, 0)


async def test_descriptors_that_do_not_come_are_named() -> None:
    desk = FdExchange()
    inbox = desk.open([10, 20, 30])
    descriptor = make_descriptor()
    desk.on_offer(PEER, inbox.token, 1, 20, descriptor)
    with pytest.raises(InvalidRequest, match=r"handles \[0, 2\] were not offered within 0.01 s"):
        await inbox.wait(0.01)
    desk.drop(inbox)
    assert not is_open(descriptor)
