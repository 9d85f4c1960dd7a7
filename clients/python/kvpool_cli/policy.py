"""`kvpool policy`: what every pagestore does with a keyspace's pages."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvpool.client.index import NamedKeyspace
from kvpool.core.errors import InvalidRequest
from kvpool.core.policy import KeyspacePolicy, StagingMode, WritePolicy, option_name, option_of
from kvpool.core.retention import Retention
from kvpool_cli.output import EXIT_OK, CommandFailed, print_json, show, size, size_from_text, table
from kvpool_cli.targets import Target, add_target, find_target, open_index, run


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool policy set` and `kvpool policy show`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    change = actions.add_parser("set", help="change a policy; what is not named stays as it is", allow_abbrev=False)
    add_target(change)
    change.add_argument("name", metavar="NAME", help="the keyspace")
    change.add_argument("--reset", action="store_true", help="begin with the defaults of the nodes")
    for flag, kind, text in (
        ("--write-policy", _option(WritePolicy), "default, write-back, write-through, selective or staging-only"),
        ("--staging", _option(StagingMode), "default, cache or transit"),
        ("--selective-min-uses", int, "selective: pages go to disk at this use; 0: as the node says"),
        ("--selective-min-tokens", int, "selective: pages of prompts this long go at once; 0: as the node says"),
        ("--replicas", int, "nodes that should hold each page; 0: as the nodes say"),
        ("--quota", size_from_text, "bytes on each node, such as 10GiB; 0: no quota"),
        ("--ttl-ms", int, "time to live of pages that were stored without one; 0: no limit"),
        ("--priority", int, "of pages that were stored without one: -100, first to go, to 100"),
    ):
        change.add_argument(flag, type=kind, help=text)
    change.set_defaults(run=run_set)
    show = actions.add_parser("show", help="show policies", allow_abbrev=False)
    add_target(show)
    show.add_argument("name", metavar="NAME", nargs="?", default="", help="only this keyspace")
    show.add_argument("--json", action="store_true", help="for programs")
    show.set_defaults(run=run_show)


def run_set(arguments: argparse.Namespace) -> int:
    """Change one policy; pagestores learn it with their next lease renewal."""
    target = find_target(arguments)

    async def change() -> NamedKeyspace:
        async with open_index(target) as index:
            (found,) = await _named(target, arguments.name)
            before = found.policy.policy if found.policy is not None and not arguments.reset else KeyspacePolicy()
            told = await index.set_keyspace_policy(found.name, changed(before, arguments))
            return replace(found, policy=told)

    show(render([run(change())]))
    return EXIT_OK


def run_show(arguments: argparse.Namespace) -> int:
    """Show all policies, or one."""
    named = run(_named(find_target(arguments), arguments.name))
    if arguments.json:
        print_json({"keyspaces": [document(one) for one in named]})
    else:
        show(render(named))
    return EXIT_OK


def changed(policy: KeyspacePolicy, arguments: argparse.Namespace) -> KeyspacePolicy:
    """The policy with what was named on the command line. Raises InvalidRequest for what cannot be."""

    def named(**fields: Any) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if value is not None}

    retention = replace(policy.retention, **named(ttl_ms=arguments.ttl_ms, priority=arguments.priority))
    wanted = replace(
        policy,
        **named(
            write_policy=arguments.write_policy,
            staging=arguments.staging,
            selective_min_uses=arguments.selective_min_uses,
            selective_min_tokens=arguments.selective_min_tokens,
            replication_factor=arguments.replicas,
            quota_bytes=arguments.quota,
        ),
        retention=retention,
    )
    wanted.check()
    return wanted


def document(named: NamedKeyspace) -> dict[str, Any]:
    """One keyspace for programs; version 0 means that no policy was ever set."""
    policy = named.policy.policy if named.policy is not None else KeyspacePolicy()
    return {
        "name": named.name,
        "keyspace_id": named.keyspace.hex(),
        "version": named.policy.version if named.policy is not None else 0,
        "write_policy": option_name(policy.write_policy),
        "staging": option_name(policy.staging),
        "selective_min_uses": policy.selective_min_uses,
        "selective_min_tokens": policy.selective_min_tokens,
        "replication_factor": policy.replication_factor,
        "quota_bytes": policy.quota_bytes,
        "ttl_ms": policy.retention.ttl_ms,
        "priority": policy.retention.priority,
    }


def render(keyspaces: list[NamedKeyspace]) -> str:
    """A table for people; - stands for what is left to the nodes."""
    rows = []
    for one in keyspaces:
        policy = one.policy.policy if one.policy is not None else KeyspacePolicy()
        rows.append(
            [
                one.name,
                option_name(policy.write_policy) if policy.write_policy else "-",
                option_name(policy.staging) if policy.staging else "-",
                policy.replication_factor or "-",
                size(policy.quota_bytes) if policy.quota_bytes else "-",
                _selective(policy),
                _retention(policy.retention),
            ]
        )
    return table(["keyspace", "writes", "staging", "replicas", "quota a node", "selective", "retention"], rows)


def _selective(policy: KeyspacePolicy) -> str:
    parts = [f"{policy.selective_min_uses} uses"] if policy.selective_min_uses else []
    parts += [f"{policy.selective_min_tokens} tokens"] if policy.selective_min_tokens else []
    return ", ".join(parts) or "-"


def _retention(retention: Retention) -> str:
    parts = [f"{retention.ttl_ms} ms"] if retention.ttl_ms else []
    parts += [f"priority {retention.priority}"] if retention.priority else []
    return ", ".join(parts) or "-"


async def _named(target: Target, name: str) -> list[NamedKeyspace]:
    """All keyspaces, or the one of that name. Raises CommandFailed if there is none."""
    async with open_index(target) as index:
        keyspaces = await index.list_keyspaces()
    found = [one for one in keyspaces if not name or one.name == name]
    if name and not found:
        names = ", ".join(one.name for one in keyspaces) or "none yet"
        raise CommandFailed(f"there is no keyspace {name!r}; known: {names}")
    return found


def _option(kind: type[WritePolicy] | type[StagingMode]) -> Callable[[str], WritePolicy | StagingMode]:
    def parse(text: str) -> WritePolicy | StagingMode:
        try:
            return option_of(kind, text)
        except InvalidRequest as error:
            raise argparse.ArgumentTypeError(error.message) from error

    return parse
