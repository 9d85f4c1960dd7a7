"""Options of every command: which cluster, how it is reached, and the form of the output.

They may stand anywhere: before, between or after the words of a command. Imported by each start of `kvpool`, so
that nothing heavy is imported here.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from kvpool.client.tls import TLS_VARIABLES
from kvpool_cli.state import DEFAULT_STATE_DIR

_CLUSTER = "Cluster and output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The values of the options that every command has. index: empty for the cluster of the state directory."""

    state_dir: Path = DEFAULT_STATE_DIR
    index: str = ""
    json: bool = False
    tls: Mapping[str, str] = field(default_factory=dict)
    argv: Sequence[str] = ()  # the whole command line


_JSON = Annotated[bool, typer.Option("--json", help="A document for programs.", rich_help_panel=_CLUSTER)]
COMMON_OPTIONS: dict[str, Any] = {
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
    "json": _JSON,
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
COMMON_FLAGS = tuple("--" + name.replace("_", "-") for name in COMMON_OPTIONS)


def common_of(ctx: typer.Context, values: Mapping[str, Any]) -> Common:
    """What stands after the command counts first, then what stands before it, then the environment."""
    before: Mapping[str, Any] = ctx.find_root().obj
    given = {name: values.get(name) or before.get(name) for name in COMMON_OPTIONS}
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
    parameters = own_parameters(function, hints, tuple(hints)) + shared_parameters(COMMON_OPTIONS)

    def call(ctx: typer.Context, **values: Any) -> None:
        before = {name: values.pop(name) for name in COMMON_OPTIONS}
        ctx.obj = {"argv": ctx.obj["argv"]} | before
        function(**values)

    sign(call, parameters, function)
    return call


def own_parameters(
    function: Callable[..., Any], hints: Mapping[str, Any], names: Collection[str]
) -> list[inspect.Parameter]:
    """A function's own parameters of these names, by keyword."""
    return [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
        if name in names
    ]


def shared_parameters(options: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Parameters for options that several commands share."""
    return [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=False if hint is _JSON else None
        )
        for name, hint in options.items()
    ]


def sign(call: Any, parameters: Sequence[inspect.Parameter], function: Callable[..., Any]) -> None:
    """Make `call` look to typer as if it had these parameters."""
    ctx = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    call.__signature__ = inspect.Signature([ctx, *parameters])
    call.__annotations__ = {"ctx": typer.Context} | {each.name: each.annotation for each in parameters}
    call.__name__ = function.__name__
    # Paragraphs are filled to the width of the terminal.
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    call.__doc__ = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
