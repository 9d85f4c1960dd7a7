"""`kvpool policy`: what every pagestore does with a keyspace's pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import typer
from rich.console import RenderableType

from kvpool.client.index import NamedKeyspace
from kvpool.core.errors import InvalidRequest
from kvpool.core.policy import MAX_REPLICAS, KeyspacePolicy, StagingMode, WritePolicy, option_name, option_of
from kvpool.core.retention import PRIORITY_MAX, Retention
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_OK, UsageFailed
from kvpool_cli.options import OneKeyspace, RequiredKeyspace, Yes, size_option
from kvpool_cli.output import confirm, print_json, show, table
from kvpool_cli.quantities import duration, duration_from_text, size
from kvpool_cli.targets import find_target, keyspace_of_name, keyspaces_of_name, open_index, run

OptionT = TypeVar("OptionT", WritePolicy, StagingMode)


WritePolicyOption = Annotated[
    WritePolicy | None,
    typer.Option(
        parser=lambda text: _option_of(WritePolicy, text),
        metavar="POLICY",
        help=f"{', '.join(map(option_name, WritePolicy))}.",
    ),
]
StagingOption = Annotated[
    StagingMode | None,
    typer.Option(
        parser=lambda text: _option_of(StagingMode, text),
        metavar="MODE",
        help=f"{', '.join(map(option_name, StagingMode))}.",
    ),
]


def set_policy(
    common: Common,
    keyspace: RequiredKeyspace,
    reset: Annotated[bool, typer.Option("--reset", help="Begin with the defaults of the nodes.")] = False,
    write_policy: WritePolicyOption = None,
    staging: StagingOption = None,
    selective_min_uses: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Selective: pages go to disk at this use; 0: as the node says."),
    ] = None,
    selective_min_tokens: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Selective: pages of prompts this long go at once; 0: as the node says."),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_REPLICAS, metavar="N", help="Nodes that should hold each page; 0: as the nodes say."
        ),
    ] = None,
    quota: Annotated[int | None, size_option("--quota", "Of each node, such as 10GiB; 0: no quota.")] = None,
    ttl: Annotated[
        str | None,
        typer.Option(
            "--ttl", metavar="TIME", help="Time to live of pages stored without one, such as 7d; 0: no limit."
        ),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            min=-PRIORITY_MAX,
            max=PRIORITY_MAX,
            metavar="N",
            help="Of pages stored without one: -100, first to go, to 100.",
        ),
    ] = None,
    yes: Yes = False,
) -> int:
    """Change a keyspace's policy; what is not named stays as it is.

    Pagestores learn it with their next lease renewal. A smaller quota or time to live than before is confirmed first.
    """
    target = find_target(common)
    change = Change(
        fields={
            "write_policy": write_policy,
            "staging": staging,
            "selective_min_uses": selective_min_uses,
            "selective_min_tokens": selective_min_tokens,
            "replication_factor": replicas,
            "quota_bytes": quota,
        },
        retention={"ttl_ms": None if ttl is None else _ttl_ms(ttl), "priority": priority},
    )

    async def found() -> NamedKeyspace:
        async with open_index(target) as index:
            return await keyspace_of_name(index, keyspace)

    async def apply(policy: KeyspacePolicy) -> NamedKeyspace:
        async with open_index(target) as index:
            return replace(before, policy=await index.set_keyspace_policy(before.name, policy))

    before = run(found())
    current = before.policy.policy if before.policy is not None else KeyspacePolicy()
    wanted = change.applied(KeyspacePolicy() if reset else current)
    losses = _losses(current, wanted)
    if losses:
        confirm(f"Change the policy of keyspace {before.name}? {' '.join(losses)}", yes=yes)
    return _print(common, [run(apply(wanted))])


def show_policies(common: Common, keyspace: OneKeyspace = "") -> int:
    """Show the policies of all keyspaces, or of one."""
    target = find_target(common)

    async def found() -> list[NamedKeyspace]:
        async with open_index(target) as index:
            return await keyspaces_of_name(index, keyspace)

    return _print(common, run(found()))


def _losses(current: KeyspacePolicy, wanted: KeyspacePolicy) -> list[str]:
    """What pagestores give up under `wanted` that they keep under `current`: a sentence for each cause."""
    losses = []
    if _is_lowered(current.quota_bytes, wanted.quota_bytes):
        losses.append(f"Each pagestore drops its pages beyond {size(wanted.quota_bytes)}.")
    ttl_ms = wanted.retention.ttl_ms
    if _is_lowered(current.retention.ttl_ms, ttl_ms):
        losses.append(f"Pages that are stored from now on expire after {duration(ttl_ms / 1e3)}.")
    return losses


def _is_lowered(current: int, wanted: int) -> bool:
    """Whether a limit gets tighter; 0 is no limit."""
    return wanted != 0 and (current == 0 or wanted < current)


def _print(common: Common, named: list[NamedKeyspace]) -> int:
    if common.json:
        print_json(to_document(named))
    else:
        show(render(named))
    return EXIT_OK


def _ttl_ms(text: str) -> int:
    try:
        return 0 if text == "0" else round(duration_from_text(text) * 1e3)
    except ValueError as error:
        raise UsageFailed(f"--ttl: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What was named on the command line; None was not. retention: of pages that were stored without."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    retention: Mapping[str, Any] = field(default_factory=dict)

    def applied(self, policy: KeyspacePolicy) -> KeyspacePolicy:
        """The policy with the change. Raises InvalidRequest for a policy that is contradictory."""
        retention = replace(policy.retention, **_given(self.retention))
        wanted = replace(policy, **_given(self.fields), retention=retention)
        wanted.check()
        return wanted


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def to_document(named: list[NamedKeyspace]) -> dict[str, Any]:
    """The document of `--json`."""
    return {"version": 1, "keyspaces": [document(one) for one in named]}


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


def render(keyspaces: list[NamedKeyspace]) -> RenderableType:
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
    parts = [duration(retention.ttl_ms / 1e3)] if retention.ttl_ms else []
    parts += [f"priority {retention.priority}"] if retention.priority else []
    return ", ".join(parts) or "-"


def _option_of(kind: type[OptionT], text: str | OptionT) -> OptionT:
    try:
        return option_of(kind, text) if isinstance(text, str) else text
    except InvalidRequest as error:
        raise ValueError(error.message) from error
