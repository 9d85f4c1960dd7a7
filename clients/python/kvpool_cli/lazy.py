"""Commands that are imported when they are used: `kvpool --help` and `kvpool --version` load none of them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvpool_cli.common import COMMON_FLAGS

_LOADED = ("params", "callback", "help")


class _Described:
    """What all commands and groups have: -h is help, flags are shown without a value, listings show whole sentences."""

    short_help: str | None
    help: str | None

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """The same for all commands."""
        return ["-h", "--help"]

    def get_params(self, ctx: Any) -> Any:
        """As typer has them, with the one for help."""
        params = super().get_params(ctx)  # type: ignore[misc]  # of typer's class beside this one
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""  # typer would show <bool>
        return params

    def get_short_help_str(self, limit: int = 0) -> str:
        """The first paragraph, as help shows it on a terminal. Pages and shells wrap it themselves."""
        return (self.short_help or self.help or "").partition("\n\n")[0]


class LazyCommand(_Described, TyperCommand):
    """One command. place: "module:function"; short_help: for listings, so that they need not import it."""

    def __init__(self, name: str, place: str, *examples: str, short_help: str | None = None) -> None:
        # Lines of an epilog are joined unless an empty one is between them.
        super().__init__(name, epilog="\n\n".join(["Examples:", *examples]), short_help=short_help)
        self._place = place
        for attribute in _LOADED:
            delattr(self, attribute)

    def __getattr__(self, name: str) -> Any:
        """Called for what __init__ has removed."""
        if name not in _LOADED:
            raise AttributeError(name)
        from kvpool_cli.options import command

        module, _, function = self._place.partition(":")
        made = typer.Typer(add_completion=False)
        made.command(self.name)(command(getattr(import_module(module), function)))
        loaded = typer.main.get_command(made)
        for attribute in _LOADED:
            setattr(self, attribute, getattr(loaded, attribute))
        return getattr(self, name)


class Group(_Described, TyperGroup):
    """A group of commands. Options of every command that stand before its name count as if they stood after it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Called by the group above, or with the whole command line."""
        count = 0
        while ctx.parent is not None and count < len(args) and args[count].partition("=")[0] in COMMON_FLAGS:
            count += 1 if args[count] == "--json" or "=" in args[count] else 2
        # Without options a group shows its help, which is no document.
        wants_document = not args and not ctx.resilient_parsing and "--json" in ctx.find_root().obj["argv"]
        if wants_document or (count and count >= len(args)):
            ctx.fail("Missing command.")
        common, rest = args[:count], args[count:]
        return super().parse_args(ctx, [*rest[:1], *common, *rest[1:]])


def group(name: str, text: str, commands: Sequence[LazyCommand]) -> Group:
    """`kvpool NAME`."""
    return Group(name=name, help=text, commands=commands, no_args_is_help=True)
