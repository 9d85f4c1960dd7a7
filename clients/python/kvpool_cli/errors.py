"""How a command ends. Imports nothing beside the standard library."""

from __future__ import annotations

from typing import ClassVar

EXIT_OK = 0
EXIT_FAILED = 1  # or something is wrong
EXIT_USAGE = 2  # not understood, not confirmed, or could not start


class CommandFailed(Exception):
    """A command cannot do what it was asked; the message, one line, says what to do next."""

    exit_code: ClassVar[int] = EXIT_FAILED


class UsageFailed(CommandFailed):
    """The options of a command do not fit together; nothing was called."""

    exit_code = EXIT_USAGE


class NotConfirmed(CommandFailed):
    """A destructive command was not confirmed: nothing was changed."""

    exit_code = EXIT_USAGE
