"""`kvpool cluster status`: one stable document about a cluster, and its tables."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table

from kvpool.client.index import NamedKeyspace
from kvpool.client.pagestore_control import PageStoreStatus
from kvpool.core.cluster import LiveNode, NodeKind
from kvpool.core.errors import KvPoolError
from kvpool.core.grid import ShardGrid
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK
from kvpool_cli.output import line, natural, print_json, show, stack, table
from kvpool_cli.quantities import counted, size
from kvpool_cli.targets import Target, find_target, open_agent, open_index, open_pagestore, run, said

STATUS_VERSION = 1
NODE_TIMEOUT_S = 2.0


def status(
    common: Common,
    check: Annotated[
        bool, typer.Option("--check", help="For monitoring: print only what is wrong; exit code 1 if anything is.")
    ] = False,
    expect: Annotated[
        int, typer.Option(min=0, metavar="N", help="Pagestores that there should be: fewer is wrong, too.")
    ] = 0,
) -> int:
    """Show nodes, their arenas and disks, keyspaces; exit code 1 if the store or a node cannot be reached."""
    target = find_target(common)
    document = run(read_status(target))
    document["problems"] += missing_nodes(document, expect)
    if common.json:
        print_json(document)
    elif check:
        show("\n".join(document["problems"]) or f"ok: {_summary(document['nodes'])}")
    else:
        show(render(document))
    if check:
        return EXIT_FAILED if document["problems"] else EXIT_OK
    healthy = document["store"]["reachable"] and not any(node["error"] for node in document["nodes"])
    return EXIT_OK if healthy else EXIT_FAILED


async def read_status(target: Target) -> dict[str, Any]:
    """The document of `--json`. Raises CommandFailed when the index does not answer."""
    async with open_index(target) as index:
        info = await index.get_info()
        nodes: Sequence[LiveNode] = []
        keyspaces: Sequence[NamedKeyspace] = []
        if info.store_reachable:
            nodes, keyspaces = await asyncio.gather(index.list_nodes(), index.list_keyspaces())
        described = await asyncio.gather(*(_node(target, node) for node in nodes))
        documents = [_keyspace(keyspace) for keyspace in keyspaces]
    document: dict[str, Any] = {
        "version": STATUS_VERSION,
        "index": {"endpoint": target.index_endpoint, "version": info.version, "lease_ttl_ms": info.lease_ttl_ms},
        "store": {
            "kind": info.store,
            "reachable": info.store_reachable,
            "description": target.state.store if target.state else "",
        },
        "nodes": sorted(described, key=lambda node: (natural(node["host_id"]), node["kind"], node["endpoint"])),
        "keyspaces": documents,
        "processes": _processes(target),
    }
    return document | {"problems": problems(document)}


def problems(document: dict[str, Any]) -> list[str]:
    """One line for each thing that somebody should look after; a node that is drained on purpose is none."""
    found = [] if document["store"]["reachable"] else ["the index's store is not reachable: matches miss everywhere"]
    nodes = document["nodes"]
    if document["store"]["reachable"] and not any(node["kind"] == "pagestore" for node in nodes):
        found.append("no pagestore has a lease: nothing can be stored")
    for node in nodes:
        name = f"{node['kind']} {node['node_id'][:8]} ({node['host_id']})"
        if node["error"]:
            found.append(f"{name} does not answer: {node['error']}")
        if node["disk"]["fault"]:
            state = node["disk"].get("state", "").replace("_", "-")
            found.append(f"{name}: its disk tier is {state or 'out of service'}: {node['disk']['fault']}")
    found += [f"{process['name']} is not running" for process in document["processes"] if not process["alive"]]
    return found


def missing_nodes(document: dict[str, Any], expected: int) -> list[str]:
    """A line if fewer pagestores have a lease than there should be."""
    found = sum(node["kind"] == "pagestore" for node in document["nodes"])
    return [f"{found} of {expected} pagestores have a lease"] if found < expected else []


async def _node(target: Target, node: LiveNode) -> dict[str, Any]:
    info, load = node.info, node.load
    document: dict[str, Any] = {
        "node_id": info.node_id.hex(),
        "kind": info.kind.name.lower(),
        "host_id": info.host_id,
        "endpoint": info.endpoint,
        "bulk_endpoint": info.bulk_endpoint,
        "local_socket": info.local_socket,
        "metrics_url": info.metrics_url,
        "incarnation": info.incarnation,
        "draining": info.draining,
        "lease_remaining_ms": node.lease_remaining_ms,
        "arena": {"used_bytes": load.arena_used_bytes, "capacity_bytes": load.arena_capacity_bytes},
        "disk": {"used_bytes": load.disk_used_bytes, "capacity_bytes": load.disk_capacity_bytes, "fault": ""},
        "pages": {"staging": 0, "dirty": 0, "disk": 0},
        "sessions": 0,
        "leases": 0,
        "error": "",
    }
    try:
        if info.kind is NodeKind.PAGESTORE:
            async with open_pagestore(target, info.endpoint) as pagestore:
                _add_pagestore(document, await pagestore.status(timeout_s=NODE_TIMEOUT_S))
        else:
            async with open_agent(target, info.endpoint) as agent:
                document["sessions"] = len((await agent.status(timeout_s=NODE_TIMEOUT_S)).sessions)
    except KvPoolError as error:
        document["error"] = said(error)
    return document


def _add_pagestore(document: dict[str, Any], status: PageStoreStatus) -> None:
    """What the node itself says is newer than what the index got with its last renewal."""
    document["arena"] = {
        "used_bytes": status.arena_used_bytes,
        "capacity_bytes": status.arena_capacity_bytes,
        "segment_bytes": status.arena_segment_bytes,
        "quarantined_bytes": status.arena_quarantined_bytes,
    }
    document["disk"] = {
        "used_bytes": status.disk_used_bytes,
        "capacity_bytes": status.disk_capacity_bytes,
        "fault": status.disk_fault,
        "state": status.disk_state,
    }
    document["pages"] = {
        "staging": status.staging_page_count,
        "dirty": status.dirty_page_count,
        "disk": status.disk_page_count,
    }
    document["sessions"] = status.session_count
    document["leases"] = status.lease_count


def _keyspace(keyspace: NamedKeyspace) -> dict[str, Any]:
    spec = keyspace.spec
    grid = ShardGrid.of(spec)
    return {
        "name": keyspace.name,
        "keyspace_id": keyspace.keyspace.hex(),
        "model_id": spec.model_id,
        "model_revision": spec.model_revision,
        "dtype": spec.dtype.name.lower(),
        "codec": spec.codec.name.lower(),
        "payload": spec.payload.name.lower(),
        "chunk_tokens": spec.chunk_tokens,
        "layer_groups": grid.layer_groups,
        "splits": list(grid.splits),
    }


def _processes(target: Target) -> list[dict[str, Any]]:
    processes = target.state.processes if target.state else ()
    return [
        {"name": process.name, "role": process.role, "pid": process.pid, "alive": process.alive()}
        for process in processes
    ]


def render(document: dict[str, Any]) -> RenderableType:
    """Tables for people."""
    store, index = document["store"], document["index"]
    reachable = "reachable" if store["reachable"] else "NOT REACHABLE"
    described = f" ({store['description']})" if store["description"] else ""
    parts: list[RenderableType | str] = [
        f"index: {index['endpoint']}, version {index['version']}",
        f"store: {store['kind']}, {reachable}{described}",
        "",
        _node_table(document["nodes"]) if document["nodes"] else "no nodes are registered",
        *([_summary(document["nodes"])] if len(document["nodes"]) > 1 else []),
        *(line(fault, "red") for fault in _faults(document["nodes"])),
        "",
        _keyspace_table(document["keyspaces"])
        if document["keyspaces"]
        else "no keyspaces are open: engines open theirs when they start",
    ]
    dead = [process["name"] for process in document["processes"] if not process["alive"]]
    if dead:
        parts += ["", line(f"not running: {', '.join(dead)}", "red")]
    return stack(*parts)


def _node_table(nodes: Sequence[dict[str, Any]]) -> Table:
    headers = ["node", "kind", "host", "endpoint", "incarnation", "lease", "arena", "disk", "pages", "sessions"]
    rows = [
        [
            node["node_id"][:8],
            node["kind"] + (" (draining)" if node["draining"] else ""),
            node["host_id"],
            node["endpoint"],
            node["incarnation"],
            f"{node['lease_remaining_ms'] / 1e3:.1f} s",
            _use(node["arena"]),
            _use(node["disk"]),
            _pages(node),
            node["sessions"],
        ]
        for node in nodes
    ]
    return table(headers, rows, right=[4, 5, 9])


def _summary(nodes: Sequence[dict[str, Any]]) -> str:
    stores = [node for node in nodes if node["kind"] == "pagestore"]
    tiers = [
        f"{tier} {_use({part: sum(node[tier][part] for node in stores) for part in ('used_bytes', 'capacity_bytes')})}"
        for tier in ("arena", "disk")
    ]
    draining = sum(node["draining"] for node in nodes)
    parts = [counted(len(stores), "pagestore"), counted(len(nodes) - len(stores), "agent"), *tiers]
    return ", ".join([*parts, *([f"{draining} draining"] if draining else [])])


def _faults(nodes: Sequence[dict[str, Any]]) -> list[str]:
    silent = [f"{node['node_id'][:8]} does not answer: {node['error']}" for node in nodes if node["error"]]
    return silent + [f"{node['node_id'][:8]}: {node['disk']['fault']}" for node in nodes if node["disk"]["fault"]]


def _use(budget: dict[str, Any]) -> str:
    if not budget["capacity_bytes"]:
        return "-"
    return f"{size(budget['used_bytes'])} of {size(budget['capacity_bytes'])}"


def _pages(node: dict[str, Any]) -> str:
    if node["kind"] != "pagestore" or node["error"]:
        return "-"
    pages = node["pages"]
    return f"{pages['staging']} staged ({pages['dirty']} dirty), {pages['disk']} on disk"


def _keyspace_table(keyspaces: Sequence[dict[str, Any]]) -> Table:
    rows = [
        [
            keyspace["name"],
            keyspace["keyspace_id"][:8],
            f"{keyspace['model_id']}@{keyspace['model_revision']}",
            f"{keyspace['dtype']}, {keyspace['payload']}",
            keyspace["chunk_tokens"],
            f"{keyspace['layer_groups']} x {','.join(map(str, keyspace['splits']))}",
        ]
        for keyspace in keyspaces
    ]
    return table(["keyspace", "id", "model", "payload", "chunk tokens", "grid"], rows, right=[4])
