"""Answers that are values, not exceptions. The numbers are those of the wire."""

from __future__ import annotations

from enum import IntEnum


class Outcome(IntEnum):
    """What became of one requested page."""

    HIT = 1
    MISS = 2


class Tier(IntEnum):
    """Where bytes live, the fastest first."""

    GPU = 1
    STAGING = 2
    DISK = 3


class Admission(IntEnum):
    """The answer to a wish to write one page."""

    RESERVED = 1  # the caller is the one writer
    EXISTS = 2  # the page is already there
    PENDING = 3  # another session is writing it
    REJECTED = 4  # no room; the page is simply not stored
