"""The commands of `kvpool`, by group, and how one is run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from kvpool import __version__
from kvpool.core.errors import KvPoolError, StartupFailed
from kvpool_cli.clear import clear
from kvpool_cli.doctor.command import doctor
from kvpool_cli.down import down
from kvpool_cli.drain import drain
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, CommandFailed
from kvpool_cli.evict import evict
from kvpool_cli.export import export
from kvpool_cli.flush import flush
from kvpool_cli.import_pages import import_pages
from kvpool_cli.logs import logs
from kvpool_cli.match import match
from kvpool_cli.options import command, with_common
from kvpool_cli.output import fail
from kvpool_cli.pin import pin, unpin
from kvpool_cli.pin_list import pins
from kvpool_cli.policy import set_policy, show_policies
from kvpool_cli.route import route
from kvpool_cli.size import size
from kvpool_cli.status import status
from kvpool_cli.top import top
from kvpool_cli.up import up

_INTERRUPTED = 130  # what typer makes of Ctrl-C

app = typer.Typer(
    name="kvpool",
    help="Share the KV cache of common prompt prefixes between LLM inference engines.",
    epilog="Exit codes: 0 done; 1 failed, or something is wrong; 2 not understood, not confirmed, or could not start. "
    "Options of the cluster and --json may stand anywhere.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _group(name: str, text: str) -> typer.Typer:
    group = typer.Typer(help=text, no_args_is_help=True)
    app.add_typer(group, name=name)
    return group


def _add(group: typer.Typer, name: str, function: Callable[..., int], *examples: str) -> None:
    # Lines of an epilog are joined unless an empty one is between them.
    group.command(name, epilog="\n\n".join(["Examples:", *examples]))(command(function))


cluster = _group("cluster", "Start, end and look at a cluster.")
cache = _group("cache", "What the cluster holds of prompts: find, keep, give up, carry over.")
node = _group("node", "Nodes of the cluster.")
policy = _group("policy", "What pagestores do with a keyspace: disk writes, staging, replicas, quota.")

_add(
    *(cluster, "up", up, "kvpool cluster up --pagestores 2"),
    "kvpool cluster up --detach --arena-bytes 4GiB --disk-bytes 64GiB",
)
_add(cluster, "down", down, "kvpool cluster down")
_add(cluster, "status", status, "kvpool cluster status", "kvpool cluster status --index index-0:7100 --check --json")
_add(cluster, "logs", logs, "kvpool cluster logs", "kvpool cluster logs pagestore-0 -n 50")
_add(
    *(cache, "match", match, "kvpool cache match tokens.json --keyspace llama", "echo 1 2 3 | kvpool cache match -"),
    "kvpool cache match --text @prompt.txt --server http://host:8000",
)
_add(cache, "route", route, "kvpool cache route tokens.json --keyspace llama --json")
_add(
    *(cache, "pin", pin, "kvpool cache pin system-prompt.json --keyspace llama --for 7d"),
    "kvpool cache pin system-prompt.json --forever",
)
_add(cache, "unpin", unpin, "kvpool cache unpin system-prompt.json")
_add(cache, "pins", pins, "kvpool cache pins --keyspace llama")
_add(
    *(cache, "evict", evict, "kvpool cache evict tokens.json --keyspace llama --from-token 2048"),
    "kvpool cache evict --keyspace llama --whole-keyspace --staging-only --node host-3",
)
_add(cache, "clear", clear, "kvpool cache clear --dry-run", "kvpool cache clear --keyspace llama --yes")
_add(cache, "flush", flush, "kvpool cache flush --timeout 2m")
_add(
    *(cache, "export", export, "kvpool cache export llama.kvpx --keyspace llama"),
    "kvpool cache export prompts.kvpx system-a.json system-b.json --keyspace llama",
)
_add(
    *(cache, "import", import_pages, "kvpool cache import llama.kvpx"),
    "kvpool cache import llama.kvpx --copies 2 --digest 9f86d0...",
    "kvpool cache import --verify-only llama.kvpx",
)
_add(node, "drain", drain, "kvpool node drain host-3", "kvpool node drain --cancel 5f3a")
_add(
    *(policy, "set", set_policy),
    "kvpool policy set --keyspace llama --write-policy write-through --replicas 2 --quota 10GiB",
)
_add(policy, "show", show_policies, "kvpool policy show", "kvpool policy show --keyspace llama")
_add(app, "top", top, "kvpool top", "kvpool top --index index-0:7100 --interval 5s", "kvpool top --once --json")
_add(
    *(app, "doctor", doctor, "kvpool doctor"),
    "kvpool doctor --index index-0:7100 --redis redis://redis:6379/0 --arena-bytes 64GiB",
)
_add(
    *(app, "size", size, "kvpool size config.json --arena-bytes 256GiB --disk-bytes 4TiB"),
    "kvpool size --layers 61 --latent-dim 576",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"kvpool {__version__}\n")
        raise typer.Exit


def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Share the KV cache of common prompt prefixes between LLM inference engines."""


app.callback()(with_common(options))


def run_command(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 not understood, not confirmed or could not start."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names come from elsewhere: any of them can be shown everywhere
        sys.stdout.reconfigure(errors="backslashreplace")
    as_json = "--json" in argv
    try:
        code = app(args=list(argv), prog_name="kvpool", standalone_mode=False, obj={"argv": list(argv)})
        sys.stdout.flush()
        return EXIT_FAILED if code == _INTERRUPTED else int(code or EXIT_OK)
    except StartupFailed as error:
        return fail(error, code=EXIT_USAGE, as_json=as_json)
    except CommandFailed as error:
        return fail(error, code=error.exit_code, as_json=as_json)
    except KvPoolError as error:
        return fail(error, as_json=as_json)
    except typer.TyperException as error:
        return _not_understood(error, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output left, as `kvpool cluster logs | head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _not_understood(error: Exception, *, as_json: bool) -> int:
    """One line, with where to read on."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "kvpool"
    message = getattr(error, "format_message", lambda: str(error))()
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{message}\n")
        return EXIT_USAGE
    return fail(f"{message.rstrip('.')}; see `{path} --help`", code=EXIT_USAGE, as_json=as_json)
