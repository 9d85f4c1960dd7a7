"""Named steps in a page's life at which a test can break a process. A step costs one look into an empty dict.

Only names live here. What happens at an armed point is handed in from outside: `kvpool_server.faults` does it for a
service, and only when its environment allows that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

POINTS: Mapping[str, str] = MappingProxyType(
    {
        "pagestore.register.granted": "the index has granted an incarnation that is not on disk yet",
        "pagestore.incarnation.saved": "the incarnation is on disk, and not announced yet",
        "pagestore.reserve.granted": "slots are leased to a writer who does not know yet",
        "pagestore.commit.verified": "pages were verified and are not visible yet",
        "pagestore.commit.visible": "pages are visible, and their writer does not know yet",
        "pagestore.write.begin": "room is made, and a batch is about to be written",
        "pagestore.write.synced": "the bytes of a batch are on the medium, its records are not",
        "pagestore.write.recorded": "a batch is durable, and not announced yet",
        "pagestore.write.durable": "on_durable was called for a batch that is not announced yet",
        "pagestore.evict.delete": "pages were chosen for eviction and are still on disk",
        "pagestore.promote.read": "a slot is taken for a page that is about to be read from disk",
        "pagestore.push.start": "pages are held and about to be sent to another node",
        "pagestore.push.end": "another node has answered for pages that were sent to it",
        "pagestore.pull.received": "one page of a pull has arrived, others may not have",
        "index.announce.begin": "a batch of changes is about to be applied",
        "index.announce.applied": "a batch is in the store, its events are not",
        "index.announce.logged": "a batch and its events are in the store, and it is not acknowledged",
        "gpuagent.store.gathered": "pages were gathered, and the engine may reuse its slots",
        "gpuagent.store.committing": "the engine has kept its slots, and pages are about to be committed",
        "gpuagent.store.committed": "pages are committed, and the engine does not know yet",
    }
)
"""Every point and when it is reached."""

_armed: dict[str, Callable[[], None]] = {}  # of the process: a point is reached from any thread


def reach(name: str) -> None:
    """This step is being taken. Raises what the armed action raises."""
    action = _armed.get(name)
    if action is not None:
        action()


def arm(name: str, action: Callable[[], None]) -> None:
    """Have `action` called each time the point is reached, on the thread that reaches it. Raises KeyError."""
    if name not in POINTS:
        raise KeyError(name)
    _armed[name] = action


def disarm_all() -> None:
    """Back to normal."""
    _armed.clear()
