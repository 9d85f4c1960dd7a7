"""What an examination finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad it is: only ERROR makes the command fail."""

    OK = "ok"
    SKIPPED = "skipped"  # could not, or need not, be looked at here
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. subject: stable, for programs; remediation: what to do, empty where all is well."""

    subject: str
    level: Level
    message: str
    remediation: str = ""


def ok(subject: str, message: str) -> Finding:
    """Nothing to do."""
    return Finding(subject=subject, level=Level.OK, message=message)


def skipped(subject: str, message: str, remediation: str = "") -> Finding:
    """Not looked at; the remediation says how it could be."""
    return Finding(subject=subject, level=Level.SKIPPED, message=message, remediation=remediation)


def warning(subject: str, message: str, remediation: str) -> Finding:
    """It works, but not as well, or not for long."""
    return Finding(subject=subject, level=Level.WARNING, message=message, remediation=remediation)


def failure(subject: str, message: str, remediation: str) -> Finding:
    """It does not work, or will lose something."""
    return Finding(subject=subject, level=Level.ERROR, message=message, remediation=remediation)
