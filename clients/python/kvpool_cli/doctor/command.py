"""The command: which examinations are made, and how their findings are told."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpool.core.errors import KvPoolError
from kvpool_cli.cluster import socket_dir
from kvpool_cli.doctor.cluster import examine_nodes, examine_packages, examine_status
from kvpool_cli.doctor.finding import Finding, Level, bad, skipped
from kvpool_cli.doctor.gpu import examine_gpu
from kvpool_cli.doctor.machine import Machine, examine_machine
from kvpool_cli.doctor.redis_server import examine_redis
from kvpool_cli.doctor.storage import examine_directory
from kvpool_cli.output import EXIT_FAILED, EXIT_OK, CommandFailed, print_json, show, size_from_text
from kvpool_cli.state import read_state
from kvpool_cli.status import read_status
from kvpool_cli.targets import Target, add_target, find_target, run, said

_SIGNS = {Level.OK: "ok  ", Level.SKIPPED: "-   ", Level.WARNING: "WARN", Level.BAD: "BAD "}


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool doctor`."""
    parser.description = (
        "Look at this machine and, if one is named or runs here, at a cluster, and say what is or will be wrong, each "
        "with its cure. Run it where a pagestore or an agent runs, or will run. Exit code 1 if anything is bad."
    )
    add_target(parser)
    parser.add_argument("--redis", default="", metavar="URL", help="of the index; also env KVPOOL_REDIS_URL")
    parser.add_argument("--arena-bytes", type=size_from_text, default=0, metavar="SIZE", help="of pagestores here")
    parser.add_argument("--data-dir", type=Path, default=None, help="of a pagestore here (default: the cluster's)")
    parser.add_argument("--disk-bytes", type=size_from_text, default=0, metavar="SIZE", help="of its disk tier")
    parser.add_argument("--quiet", action="store_true", help="only what is bad or to be warned of")
    parser.add_argument("--json", action="store_true", help="a document for programs")
    parser.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Examine; exit code 1 if anything is bad."""
    findings = examine(arguments)
    if arguments.json:
        print_json(to_document(findings))
    else:
        show(render(findings, quiet=arguments.quiet))
    return EXIT_FAILED if any(finding.level is Level.BAD for finding in findings) else EXIT_OK


def examine(arguments: argparse.Namespace) -> list[Finding]:
    """All that can be looked at from here."""
    findings = list(examine_packages())
    document: Mapping[str, Any] | None = None
    target: Target | None = None
    if arguments.index or read_state(arguments.state_dir) is not None:
        try:
            target = find_target(arguments)
            document = run(read_status(target))
        except CommandFailed as error:
            findings.append(bad("index", str(error), "start it, or name another by --index HOST:PORT"))
        except KvPoolError as error:  # it answered, or was not even asked
            findings.append(bad("index", said(error), "mend that, or name another index by --index HOST:PORT"))
    else:
        findings.append(skipped("cluster", "no cluster runs here and none is named", "--index HOST:PORT"))
    here = _pagestores_here(document, target)
    machine = Machine(
        arena_bytes=arguments.arena_bytes or sum(node["arena"]["capacity_bytes"] for node in here),
        arena_used_bytes=sum(node["arena"].get("segment_bytes", 0) for node in here),
    )
    findings += examine_machine(machine)
    findings += _storage(arguments, target, here)
    nodes: Sequence[Mapping[str, Any]] = document["nodes"] if document is not None else ()
    findings += examine_gpu(machine, [node["local_socket"] for node in nodes if node["kind"] == "agent"])
    if document is not None:
        findings += examine_status(document)
        findings += run(examine_nodes(nodes, is_embedded=target is not None and target.state is not None))
    findings += _redis(arguments, target)
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


def _storage(arguments: argparse.Namespace, target: Target | None, here: Sequence[Mapping[str, Any]]) -> list[Finding]:
    if arguments.data_dir is not None:
        return list(examine_directory(arguments.data_dir, arguments.disk_bytes))
    if target is None or target.state is None:
        return [skipped("disk_space", "no data directory is known", "--data-dir DIR --disk-bytes SIZE")]
    wanted_bytes = arguments.disk_bytes or max([0, *(node["disk"]["capacity_bytes"] for node in here)])
    directories = [arguments.state_dir / process.name for process in target.state.of_role("pagestore")]
    return [finding for directory in directories for finding in examine_directory(directory, wanted_bytes)]


def _redis(arguments: argparse.Namespace, target: Target | None) -> list[Finding]:
    url = arguments.redis or os.environ.get("KVPOOL_REDIS_URL", "")
    if not url and target is not None and target.state is not None and target.state.of_role("redis"):
        url = f"unix://{socket_dir(arguments.state_dir) / 'redis.sock'}"
    if not url:
        return [skipped("redis", "no Redis is named", "--redis URL, as the index has it")]
    return list(examine_redis(url))


def to_document(findings: Sequence[Finding]) -> dict[str, Any]:
    """The document of `--json`."""
    return {
        "version": 1,
        "bad": sum(finding.level is Level.BAD for finding in findings),
        "warnings": sum(finding.level is Level.WARNING for finding in findings),
        "findings": [
            {
                "subject": finding.subject,
                "level": finding.level.value,
                "message": finding.message,
                "cure": finding.cure,
            }
            for finding in findings
        ],
    }


def render(findings: Sequence[Finding], *, quiet: bool) -> str:
    """A line each, the worst last, where it is still on the screen."""
    order = list(_SIGNS)
    lines = []
    for finding in sorted(findings, key=lambda one: order.index(one.level)):
        if quiet and finding.level in (Level.OK, Level.SKIPPED):
            continue
        lines.append(f"{_SIGNS[finding.level]} {finding.subject:<18} {finding.message}")
        if finding.cure:
            lines.append(f"{'':>24}-> {finding.cure}")
    bad_count = sum(finding.level is Level.BAD for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    return "\n".join([*lines, f"{len(findings)} looked at: {bad_count} bad, {warnings} to be warned of"])
