"""A token calls each action exactly once, whichever thread cancels it and whenever the action was added."""

from __future__ import annotations

import threading
from functools import partial

from kvpool.core.cancel import CancelToken


def test_actions_are_called_once_in_order_and_late_ones_at_once() -> None:
    token, called = CancelToken(), list[str]()
    token.on_cancel(lambda: called.append("first"))
    token.on_cancel(lambda: called.append("second"))
    assert (token.cancelled, called) == (False, [])
    token.cancel()
    token.cancel()
    assert (token.cancelled, called) == (True, ["first", "second"])
    token.on_cancel(lambda: called.append("late"))
    token.cancel()
    assert called == ["first", "second", "late"]


def test_an_action_that_was_taken_back_is_not_called() -> None:
    token, called = CancelToken(), list[str]()
    remove = token.on_cancel(lambda: called.append("gone"))
    remove()
    token.cancel()
    remove()
    assert not called


def test_an_action_may_add_another() -> None:
    token, called = CancelToken(), list[str]()
    token.on_cancel(lambda: token.on_cancel(lambda: called.append("inner")))
    token.cancel()
    assert called == ["inner"]


def test_threads_that_add_while_another_cancels_have_each_action_called_once() -> None:
    for _ in range(50):
        token, called, begin = CancelToken(), list[int](), threading.Barrier(3)
        parts = (range(20), range(20, 40))
        threads = [threading.Thread(target=add_all, args=(token, called, begin, part)) for part in parts]
        for thread in threads:
            thread.start()
        begin.wait()
        token.cancel()
        for thread in threads:
            thread.join()
        assert sorted(called) == list(range(40))


def add_all(token: CancelToken, called: list[int], begin: threading.Barrier, numbers: range) -> None:
    begin.wait()
    for number in numbers:
        token.on_cancel(partial(called.append, number))
