"""Options that several commands share, and how a function with typed parameters becomes a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from kvpool.core.byte_sizes import size_from_text
from kvpool_cli.common import COMMON_OPTIONS, Common, common_of, own_parameters, shared_parameters, sign
from kvpool_cli.prompts import TokenSource
from kvpool_cli.quantities import duration_from_text

_PROMPT = "Prompt"


def _named(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """Refuse a name that came out empty, as that of a variable that is not set: it must not stand for all."""
    source = ctx.get_parameter_source(str(param.name))
    if not value and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter(
            "must not be empty" + ("" if param.required else "; leave the option out to name none")
        )
    return value


def _name_option(*flags: str, metavar: str, help: str) -> Any:
    return typer.Option(*flags, metavar=metavar, help=help, callback=_named)


Keyspace = Annotated[str, _name_option("--keyspace", "-k", metavar="NAME", help="Needed if there is more than one.")]
RequiredKeyspace = Annotated[str, _name_option("--keyspace", "-k", metavar="NAME", help="The keyspace.")]
OneKeyspace = Annotated[str, _name_option("--keyspace", "-k", metavar="NAME", help="Only this one (default: all).")]
Node = Annotated[
    str, _name_option("--node", metavar="NODE", help="Only this one: node id (its beginning), host id or endpoint.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; required without a terminal.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would go; nothing is changed.")]


def size_option(flag: str, text: str) -> Any:
    """An option that takes a size."""
    return typer.Option(flag, parser=size_from_text, metavar="SIZE", help=text, show_default=False)


def duration_option(flag: str, text: str) -> Any:
    """An option that takes a duration."""
    return typer.Option(flag, parser=duration_from_text, metavar="TIME", help=text, show_default=False)


_TOKENS: dict[str, Any] = {
    "tokens": Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE", help="Token ids as a JSON list or separated by blanks; - is stdin."),
    ],
    "text": Annotated[
        str | None,
        typer.Option(
            "--text", metavar="TEXT", help="A prompt instead of a FILE; @FILE reads it.", rich_help_panel=_PROMPT
        ),
    ],
    "tokenizer": Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="NAME",
            help="Tokenizes --text: a directory, a tokenizer.json, or a name on the Hugging Face hub.",
            rich_help_panel=_PROMPT,
        ),
    ],
    "server": Annotated[
        str | None,
        typer.Option(
            "--server", metavar="URL", help="Tokenizes --text: the /tokenize of this server.", rich_help_panel=_PROMPT
        ),
    ],
}


def command(function: Callable[..., int]) -> Callable[..., int]:
    """What typer calls for `function`: a parameter of type Common or TokenSource stands for several options."""
    hints = get_type_hints(function, include_extras=True)
    shared: dict[str, Any] = {}
    for hint in hints.values():
        shared |= COMMON_OPTIONS if hint is Common else _TOKENS if hint is TokenSource else {}
    own = [name for name, hint in hints.items() if hint not in (Common, TokenSource)]
    parameters = own_parameters(function, hints, own) + shared_parameters(shared)

    def call(ctx: typer.Context, **values: Any) -> int:
        of_common = {name: values.pop(name) for name in COMMON_OPTIONS if name in shared}
        of_tokens = {name: values.pop(name) for name in _TOKENS if name in shared}
        for name, hint in hints.items():
            if hint is Common:
                values[name] = common_of(ctx, of_common)
            elif hint is TokenSource:
                tokens = of_tokens.pop("tokens") or ()
                values[name] = TokenSource(tokens=tokens, **{key: value or "" for key, value in of_tokens.items()})
        return function(**values)

    sign(call, parameters, function)
    return call
