"""`kvpool cache pins`: what is pinned, by keyspace and chain."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from kvpool.client.pagestore_control import ListedChunk, PageStoreControl
from kvpool.core.errors import KvPoolError
from kvpool.core.retention import PINNED_FOREVER_US
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK
from kvpool_cli.options import OneKeyspace
from kvpool_cli.output import print_json, show, table
from kvpool_cli.targets import Target, find_target, live_pagestores, on_pagestores, open_index, run, said

_LIST_TIMEOUT_S = 60.0


@dataclass(slots=True, kw_only=True)
class PinnedGroup:
    """Pinned chunks of one chain group, on all nodes together."""

    keyspace: str
    head: str
    chunks: set[bytes] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    first_index: int = 1 << 62
    first_end_us: int = PINNED_FOREVER_US  # the pin that ends first

    def add(self, host: str, chunk: ListedChunk) -> None:
        """One of them, on a host."""
        self.chunks.add(chunk.chunk_hash)
        self.hosts.add(host)
        self.first_index = min(self.first_index, chunk.metadata.chunk_index)
        self.first_end_us = min(self.first_end_us, chunk.metadata.pinned_until_us)


def pins(common: Common, keyspace: OneKeyspace = "") -> int:
    """Show what is pinned, by keyspace and chain. Exit code 1 if a node did not answer."""
    groups, failed = run(_groups(find_target(common), keyspace))
    if common.json:
        print_json({"version": 1, "groups": [_to_document(group) for group in groups], "failed": failed})
    else:
        rows = [
            [
                group.keyspace,
                group.head,
                f"{group.first_index} on",
                len(group.chunks),
                wall_time(group.first_end_us),
                ", ".join(sorted(group.hosts)),
            ]
            for group in groups
        ]
        headers = ["keyspace", "chain group", "from chunk", "chunks", "first pin ends", "hosts"]
        show(table(headers, rows, right=[3]) if rows else "nothing is pinned")
        if failed:
            show("\n".join(failed))
    return EXIT_FAILED if failed else EXIT_OK


async def _groups(target: Target, keyspace_name: str) -> tuple[list[PinnedGroup], list[str]]:
    async with open_index(target) as index:
        names = {one.keyspace: one.name for one in await index.list_keyspaces()}
        nodes = await live_pagestores(index)

    async def pinned(control: PageStoreControl) -> list[ListedChunk]:
        return [chunk async for chunk in control.list_chunks(pinned_only=True, timeout_s=_LIST_TIMEOUT_S)]

    groups: dict[tuple[bytes, bytes], PinnedGroup] = {}
    failed: list[str] = []
    for node, answer in await on_pagestores(target, nodes, pinned):
        if isinstance(answer, KvPoolError):
            failed.append(f"{node.info.host_id}: {said(answer)}")
            continue
        for chunk in answer:
            name = names.get(chunk.keyspace, chunk.keyspace.hex()[:8])
            if not keyspace_name or keyspace_name == name:
                head = chunk.metadata.group_head_hash
                made = PinnedGroup(keyspace=name, head=head.hex()[:12])
                groups.setdefault((chunk.keyspace, head), made).add(node.info.host_id, chunk)
    return sorted(groups.values(), key=lambda one: (one.keyspace, one.first_index, one.head)), failed


def _to_document(group: PinnedGroup) -> dict[str, Any]:
    return {
        "keyspace": group.keyspace,
        "group_head": group.head,
        "first_chunk": group.first_index,
        "chunks": len(group.chunks),
        "first_end_us": group.first_end_us,
        "hosts": sorted(group.hosts),
    }


def wall_time(at_us: int) -> str:
    """For people; a pin may have no end."""
    if at_us == PINNED_FOREVER_US:
        return "never"
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(at_us / 1e6))
