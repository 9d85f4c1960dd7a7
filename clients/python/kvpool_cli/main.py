"""The commands of `kvpool`, by group, and how one is run."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvpool import __version__
from kvpool.core.errors import KvPoolError, StartupFailed
from kvpool_cli.common import with_common
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, CommandFailed
from kvpool_cli.lazy import Group, LazyCommand, group

_INTERRUPTED = 130  # what typer makes of Ctrl-C

_COMMANDS = (
    group(
        "cluster",
        "Start, end and look at a cluster.",
        (
            LazyCommand(
                "up",
                "kvpool_cli.up:up",
                "kvpool cluster up --pagestores 2",
                "kvpool cluster up --detach --arena-bytes 4GiB --disk-bytes 64GiB",
            ),
            LazyCommand("down", "kvpool_cli.down:down", "kvpool cluster down"),
            LazyCommand(
                "status",
                "kvpool_cli.status:status",
                "kvpool cluster status",
                "kvpool cluster status --index index-0:7100 --check --json",
            ),
            LazyCommand("logs", "kvpool_cli.logs:logs", "kvpool cluster logs", "kvpool cluster logs pagestore-0 -n 50"),
        ),
    ),
    group(
        "cache",
        "What the cluster holds of prompts: find, keep, give up, carry over.",
        (
            LazyCommand(
                "match",
                "kvpool_cli.match:match",
                "kvpool cache match tokens.json --keyspace llama",
                "echo 1 2 3 | kvpool cache match -",
                "kvpool cache match --text @prompt.txt --server http://host:8000",
            ),
            LazyCommand("route", "kvpool_cli.route:route", "kvpool cache route tokens.json --keyspace llama --json"),
            LazyCommand(
                "pin",
                "kvpool_cli.pin:pin",
                "kvpool cache pin system-prompt.json --keyspace llama --for 7d",
                "kvpool cache pin system-prompt.json --forever",
            ),
            LazyCommand("unpin", "kvpool_cli.pin:unpin", "kvpool cache unpin system-prompt.json"),
            LazyCommand("pins", "kvpool_cli.pin_list:pins", "kvpool cache pins --keyspace llama"),
            LazyCommand(
                "evict",
                "kvpool_cli.evict:evict",
                "kvpool cache evict tokens.json --keyspace llama --from-token 2048",
                "kvpool cache evict --keyspace llama --whole-keyspace --staging-only --node host-3",
            ),
            LazyCommand(
                "clear",
                "kvpool_cli.clear:clear",
                "kvpool cache clear --dry-run",
                "kvpool cache clear --keyspace llama --yes",
            ),
            LazyCommand("flush", "kvpool_cli.flush:flush", "kvpool cache flush --timeout 2m"),
            LazyCommand(
                "export",
                "kvpool_cli.export:export",
                "kvpool cache export llama.kvpx --keyspace llama",
                "kvpool cache export prompts.kvpx system-a.json system-b.json --keyspace llama",
            ),
            LazyCommand(
                "import",
                "kvpool_cli.import_pages:import_pages",
                "kvpool cache import llama.kvpx",
                "kvpool cache import llama.kvpx --copies 2 --digest 9f86d0...",
                "kvpool cache import --verify-only llama.kvpx",
            ),
        ),
    ),
    group(
        "node",
        "Nodes of the cluster.",
        (
            LazyCommand(
                "drain", "kvpool_cli.drain:drain", "kvpool node drain host-3", "kvpool node drain --cancel 5f3a"
            ),
        ),
    ),
    group(
        "policy",
        "What pagestores do with a keyspace: disk writes, staging, replicas, quota.",
        (
            LazyCommand(
                "set",
                "kvpool_cli.policy:set_policy",
                "kvpool policy set --keyspace llama --write-policy write-through --replicas 2 --quota 10GiB",
            ),
            LazyCommand(
                "show", "kvpool_cli.policy:show_policies", "kvpool policy show", "kvpool policy show --keyspace llama"
            ),
        ),
    ),
    LazyCommand(
        "top",
        "kvpool_cli.top:top",
        "kvpool top",
        "kvpool top --index index-0:7100 --interval 5s",
        "kvpool top --once --json",
        short_help="Show continuously what the cluster does: tiers, bandwidth, hits, hosts, hot chains.",
    ),
    LazyCommand(
        "doctor",
        "kvpool_cli.doctor.command:doctor",
        "kvpool doctor",
        "kvpool doctor --index index-0:7100 --redis redis://redis:6379/0 --arena-bytes 64GiB",
        "kvpool doctor --canary --server http://host-0:8000 --second http://host-1:8000",
        "kvpool doctor --canary --server http://host-0:8000 --save canary.json",
        "kvpool doctor --canary --server http://host-0:8000 --expect canary.json   # after its restart",
        short_help="Find what commonly goes wrong on this machine and in the cluster, with its remedy.",
    ),
    LazyCommand(
        "size",
        "kvpool_cli.size:size",
        "kvpool size config.json --arena-bytes 256GiB --disk-bytes 4TiB",
        "kvpool size --layers 61 --latent-dim 576",
        short_help="Show what the KV of a model takes, and how many tokens a node holds.",
    ),
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


_app = typer.Typer(
    name="kvpool",
    cls=Group,
    help="Share the KV cache of common prompt prefixes between LLM inference engines.",
    epilog="Exit codes: 0 done; 1 failed, or something is wrong; 2 not understood, not confirmed, or could not start. "
    "Options of the cluster and --json may stand anywhere.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_app.callback()(with_common(options))
app = typer.main.get_command(_app)
assert isinstance(app, Group)
app.commands = {str(each.name): each for each in _COMMANDS}


def run_command(argv: Sequence[str]) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 not understood, not confirmed or could not start."""
    from kvpool_cli.output import fail

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
    from kvpool_cli.output import fail

    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "kvpool"
    message = getattr(error, "format_message", lambda: str(error))()
    message = message.replace("Value error, ", "", 1)  # of the validation below typer; what follows is ours
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{message}\n")
        return EXIT_USAGE
    return fail(f"{message.rstrip('.')}; see `{path} --help`", code=EXIT_USAGE, as_json=as_json)
