"""Options that several commands share, and how a function with typed parameters becomes a command.

The options of `Common` may stand anywhere: before, between or after the words of a command.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from kvpool.client.tls import TLS_VARIABLES
from kvpool_cli.chains import TokenSource
from kvpool_cli.quantities import duration_from_text, size_from_text
from kvpool_cli.state import DEFAULT_STATE_DIR
from kvpool_cli.targets import Common

_CLUSTER, _PROMPT = "Cluster and output", "Prompt"


def _named(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """Refuse a name that came out empty, as that of a variable that is not set: it must not stand for all."""
    source = ctx.get_parameter_source(str(param.name))
    if not value and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("must not be empty; leave the option out to name none")
    return value


def _name_option(*flags: str, metavar: str, help: str) -> Any:
    return typer.Option(*flags, metavar=metavar, help=help, callback=_named)


Keyspace = Annotated[str, _name_option("--keyspace", "-k", metavar="NAME", help="Needed if there is more than one.")]
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


_COMMON: dict[str, Any] = {
    "index": Annotated[
        str | None,
        typer.Option(
            "--index",
            metavar="HOST:PORT",
            help="An index of the cluster, or several, comma separated (default: the state directory's; "
            "env KVPOOL_INDEX).",
            rich_help_panel=_CLUSTER,
        ),
    ],
    "state_dir": Annotated[
        Path | None,
        typer.Option(
            "--state-dir",
            metavar="DIR",
            help=f"Where `kvpool cluster up` keeps state, logs and data (default {DEFAULT_STATE_DIR}; "
            "env KVPOOL_STATE_DIR).",
            rich_help_panel=_CLUSTER,
        ),
    ],
    "json": Annotated[bool, typer.Option("--json", help="A document for programs.", rich_help_panel=_CLUSTER)],
} | {
    name: Annotated[
        str | None,
        typer.Option(
            "--" + name.replace("_", "-"),
            metavar="NAME" if name == "tls_server_name" else "FILE",
            help=f"{text} (env {TLS_VARIABLES[name]}).",
            rich_help_panel=_CLUSTER,
        ),
    ]
    for name, text in {
        "tls_ca_file": "CA bundle of the services' certificates; without it commands use no TLS",
        "tls_cert_file": "Certificate of this client, for services that demand one",
        "tls_key_file": "Its private key",
        "tls_server_name": "Name in the services' certificates, instead of the host called",
    }.items()
}
COMMON_FLAGS = tuple("--" + name.replace("_", "-") for name in _COMMON)
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
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if hints[name] is Common:
            shared |= _COMMON
        elif hints[name] is TokenSource:
            shared |= _TOKENS
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(annotation=hints[name], kind=kind))
    parameters += [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=False if name == "json" else None
        )
        for name, hint in shared.items()
    ]

    def call(ctx: typer.Context, **values: Any) -> int:
        of_common = {name: values.pop(name) for name in _COMMON if name in shared}
        of_tokens = {name: values.pop(name) for name in _TOKENS if name in shared}
        for name, hint in hints.items():
            if hint is Common:
                values[name] = common_of(ctx, of_common)
            elif hint is TokenSource:
                tokens = of_tokens.pop("tokens") or ()
                values[name] = TokenSource(tokens=tokens, **{key: value or "" for key, value in of_tokens.items()})
        return function(**values)

    _sign(call, parameters, function)
    return call


def root(ctx: typer.Context, values: Mapping[str, Any]) -> None:
    """Keep what stood before the command."""
    ctx.obj = {"argv": ctx.obj["argv"]} | dict(values)


def common_of(ctx: typer.Context, values: Mapping[str, Any]) -> Common:
    """What stands after the command counts first, then what stands before it, then the environment."""
    before: Mapping[str, Any] = ctx.find_root().obj
    given = {name: values.get(name) or before.get(name) for name in _COMMON}
    state_dir = given["state_dir"] or os.environ.get("KVPOOL_STATE_DIR") or DEFAULT_STATE_DIR
    index = given["index"]
    if index is None and not given["state_dir"]:  # a state directory that was named means its cluster
        index = os.environ.get("KVPOOL_INDEX")
    return Common(
        state_dir=Path(state_dir),
        index=index or "",
        json=bool(given["json"]),
        tls={name: given[name] or "" for name in TLS_VARIABLES},
        argv=before["argv"],
    )


def with_common(function: Callable[..., None]) -> Callable[..., None]:
    """A callback of the root, with the options of Common beside its own parameters."""
    hints = get_type_hints(function, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
    ]
    parameters += [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=False if name == "json" else None
        )
        for name, hint in _COMMON.items()
    ]

    def call(ctx: typer.Context, **values: Any) -> None:
        root(ctx, {name: values.pop(name) for name in _COMMON})
        function(**values)

    _sign(call, parameters, function)
    return call


def _sign(call: Any, parameters: Sequence[inspect.Parameter], function: Callable[..., Any]) -> None:
    """Make `call` look to typer as if it had these parameters."""
    for parameter in parameters:
        kind, option = get_args(parameter.annotation)
        if kind is bool:
            option.metavar = ""  # or help would say that a flag takes a value
    ctx = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    call.__signature__ = inspect.Signature([ctx, *parameters])
    call.__annotations__ = {"ctx": typer.Context} | {each.name: each.annotation for each in parameters}
    call.__name__ = function.__name__
    # Paragraphs are filled to the width of the terminal.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    call.__doc__ = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
