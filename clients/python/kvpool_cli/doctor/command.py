"""The command: which examinations are made, and how their findings are shown."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from kvpool.core.errors import KvPoolError
from kvpool_cli.cluster import socket_dir
from kvpool_cli.common import Common
from kvpool_cli.doctor import canary as canaries
from kvpool_cli.doctor.cluster import examine_nodes, examine_packages, examine_status
from kvpool_cli.doctor.engine_server import EngineServer
from kvpool_cli.doctor.finding import Finding, Level, failure, skipped
from kvpool_cli.doctor.gpu import examine_gpu
from kvpool_cli.doctor.machine import Machine, examine_machine
from kvpool_cli.doctor.redis_server import examine_redis
from kvpool_cli.doctor.storage import examine_directory
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, CommandFailed, UsageFailed
from kvpool_cli.options import size_option
from kvpool_cli.output import line, print_json, show, stack
from kvpool_cli.state import read_state
from kvpool_cli.status import read_status
from kvpool_cli.targets import Target, find_target, run, said

_CANARY = "Canary"
_STYLES = {Level.OK: "green", Level.SKIPPED: "dim", Level.WARNING: "yellow", Level.ERROR: "red"}
_SIGNS = {Level.OK: "ok   ", Level.SKIPPED: "-    ", Level.WARNING: "WARN ", Level.ERROR: "ERROR"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What is known of this machine from the command line; empty or 0: it is not."""

    redis_url: str = ""
    arena_bytes: int = 0
    data_dir: Path | None = None
    disk_bytes: int = 0


def doctor(
    common: Common,
    redis: Annotated[str, typer.Option(metavar="URL", envvar="KVPOOL_REDIS_URL", help="The Redis of the index.")] = "",
    arena_bytes: Annotated[int, size_option("--arena-bytes", "Of pagestores here.")] = 0,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of a pagestore here (default: the cluster's).")
    ] = None,
    disk_bytes: Annotated[int, size_option("--disk-bytes", "Of its disk tier.")] = 0,
    canary: Annotated[
        bool, typer.Option("--canary", help="Only compare what servers compute and load.", rich_help_panel=_CANARY)
    ] = False,
    server: Annotated[
        str, typer.Option(metavar="URL", help="Engine that computes, or loads with --expect.", rich_help_panel=_CANARY)
    ] = "",
    second: Annotated[str, typer.Option(metavar="URL", help="Engine that loads.", rich_help_panel=_CANARY)] = "",
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep what --server computed.", rich_help_panel=_CANARY)
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare with what --save kept before a restart.", rich_help_panel=_CANARY),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            envvar="OPENAI_API_KEY",
            help="Of the servers. Other users of this machine can see it here, but not in the variable.",
            rich_help_panel=_CANARY,
        ),
    ] = "",
) -> int:
    """Find what commonly goes wrong on this machine and in the cluster, with its remedy.

    Looks at this machine and, if one is named or runs here, at a cluster. Run it where a pagestore or an agent runs,
    or will run. Exit code 1 if there is an error.

    With --canary it asks OpenAI-compatible servers that have kvpool's connector for greedy tokens of one prompt: what
    --server computes, and --second or a restarted server loads, must be continued alike. Nothing loaded is an error, as
    are tokens from the server's own cache. If nothing is loaded, --second is asked three times, which takes up to a
    minute. --expect counts once for each restart: after it the server has the prompt in its own cache.

    The servers need /tokenize and a context of 2,095 tokens or more; those that load must report cached tokens: vLLM by
    --enable-prompt-tokens-details, SGLang by --enable-cache-report. Name each server itself, not a load balancer. Where
    tokens came from is known from vLLM's counters at /metrics, best while it serves nothing else; other engines do not
    say it, which is a warning. kvpool's connector in vLLM drops the prompts of --second after an hour and those of
    --save after a day; with other engines each run stores a prompt until it is evicted.
    """
    if canary or server or second or save or expect:
        findings = _canary_findings(canary, server, second, save, expect, api_key)
    else:
        here = Here(redis_url=redis, arena_bytes=arena_bytes, data_dir=data_dir, disk_bytes=disk_bytes)
        findings = examine(common, here)
    if common.json:
        print_json(to_document(findings))
    else:
        show(render(findings))
    return EXIT_FAILED if any(finding.level is Level.ERROR for finding in findings) else EXIT_OK


def _canary_findings(
    wanted: bool, server: str, second: str, save_file: Path | None, expect_file: Path | None, api_key: str
) -> list[Finding]:
    if not wanted:
        raise UsageFailed("--server, --second, --save and --expect go with --canary")
    if not server or sum(map(bool, (second, save_file, expect_file))) != 1:
        raise UsageFailed("--canary needs --server URL, and one of --second URL, --save FILE and --expect FILE")
    first = EngineServer(server, api_key)
    if save_file is not None:
        return list(canaries.save(first, save_file))
    if expect_file is not None:
        return list(canaries.canary_of_file(first, expect_file))
    return list(canaries.canary(first, EngineServer(second, api_key)))


def examine(common: Common, here: Here) -> list[Finding]:
    """All that can be looked at from here."""
    findings = list(examine_packages())
    document: Mapping[str, Any] | None = None
    target: Target | None = None
    if common.index or read_state(common.state_dir) is not None:
        try:
            target = find_target(common)
            document = run(read_status(target))
        except CommandFailed as error:
            findings.append(failure("index", str(error), "start it, or name another by --index HOST:PORT"))
        except KvPoolError as error:  # it answered, or was not even asked
            findings.append(failure("index", said(error), "mend that, or name another index by --index HOST:PORT"))
    else:
        findings.append(skipped("cluster", "no cluster runs here and none is named", "--index HOST:PORT"))
    stores = _pagestores_here(document, target)
    machine = Machine(
        arena_bytes=here.arena_bytes or sum(node["arena"]["capacity_bytes"] for node in stores),
        arena_used_bytes=sum(node["arena"].get("segment_bytes", 0) for node in stores),
    )
    findings += examine_machine(machine)
    findings += _storage(common, here, target, stores)
    nodes: Sequence[Mapping[str, Any]] = document["nodes"] if document is not None else ()
    findings += examine_gpu(machine, [node["local_socket"] for node in nodes if node["kind"] == "agent"])
    if document is not None:
        findings += examine_status(document)
        findings += run(examine_nodes(nodes, is_embedded=target is not None and target.state is not None))
    findings += _redis(common, here, target)
    return findings


def _pagestores_here(document: Mapping[str, Any] | None, target: Target | None) -> list[Mapping[str, Any]]:
    """Pagestores that share this machine's memory: all of an embedded cluster, else those whose socket is here."""
    nodes = [node for node in (document["nodes"] if document else ()) if node["kind"] == "pagestore"]
    if target is not None and target.state is not None:
        return nodes
    return [node for node in nodes if node["local_socket"] and _listens(node["local_socket"])]


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(1.0)
        return connection.connect_ex(path) == 0


def _storage(common: Common, here: Here, target: Target | None, stores: Sequence[Mapping[str, Any]]) -> list[Finding]:
    if here.data_dir is not None:
        return list(examine_directory(here.data_dir, here.disk_bytes))
    if target is None or target.state is None:
        return [skipped("disk_space", "no data directory is known", "--data-dir DIR --disk-bytes SIZE")]
    wanted_bytes = here.disk_bytes or max([0, *(node["disk"]["capacity_bytes"] for node in stores)])
    directories = [common.state_dir / process.name for process in target.state.of_role("pagestore")]
    return [finding for directory in directories for finding in examine_directory(directory, wanted_bytes)]


def _redis(common: Common, here: Here, target: Target | None) -> list[Finding]:
    url = here.redis_url
    if not url and target is not None and target.state is not None and target.state.of_role("redis"):
        url = f"unix://{socket_dir(common.state_dir) / 'redis.sock'}"
    if not url:
        return [skipped("redis", "no Redis is named", "--redis URL, as the index has it")]
    return list(examine_redis(url))


def to_document(findings: Sequence[Finding]) -> dict[str, Any]:
    """The document of `--json`."""
    return {
        "version": 1,
        "errors": sum(finding.level is Level.ERROR for finding in findings),
        "warnings": sum(finding.level is Level.WARNING for finding in findings),
        "findings": [
            {
                "subject": finding.subject,
                "level": finding.level.value,
                "message": finding.message,
                "remediation": finding.remediation,
            }
            for finding in findings
        ],
    }


def render(findings: Sequence[Finding]) -> RenderableType:
    """A line each, the worst last, where it is still on the screen."""
    order = list(_SIGNS)
    lines: list[RenderableType] = []
    for finding in sorted(findings, key=lambda one: order.index(one.level)):
        lines.append(line(f"{_SIGNS[finding.level]} {finding.subject:<18} {finding.message}", _STYLES[finding.level]))
        if finding.remediation:
            lines.append(line(f"{'':>25}-> {finding.remediation}"))
    error_count = sum(finding.level is Level.ERROR for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    return stack(*lines, f"{len(findings)} looked at: {error_count} errors, {warnings} warnings")
