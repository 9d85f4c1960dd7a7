"""Ending work early: the caller that needs no result any more cancels the token that it gave to the work."""

from __future__ import annotations

from collections.abc import Callable


class CancelToken:
    """Work asks `cancelled` between its steps, or has an action called. Cancelled once, for ever. Thread-safe.

    Without locks: a step of a dict is atomic, and the thread that takes an action out of it is the one that calls it.
    """

    __slots__ = ("_actions", "_cancelled")

    def __init__(self) -> None:
        self._cancelled = False
        self._actions: dict[object, Callable[[], object]] = {}

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Call all actions, in the order in which they were added. Idempotent."""
        self._cancelled = True
        for key in list(self._actions):
            self._call(key)

    def on_cancel(self, action: Callable[[], object]) -> Callable[[], None]:
        """Have `action` called once when the token is cancelled, at once if it is already, in the thread that does so.

        Return what takes the action back; later than the cancellation it does nothing.
        """
        key = object()
        self._actions[key] = action
        if self._cancelled:  # `cancel` may have looked before the action was there
            self._call(key)

        def remove() -> None:
            self._actions.pop(key, None)

        return remove

    def _call(self, key: object) -> None:
        action = self._actions.pop(key, None)
        if action is not None:
            action()
