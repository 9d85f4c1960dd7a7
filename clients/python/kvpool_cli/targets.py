"""Which cluster a command speaks to, and clients for its parts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpool.client.config import ClientConfig
from kvpool.client.gpuagent_control import AgentControl
from kvpool.client.index import IndexClient, NamedKeyspace
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.client.tls import TlsCredentials, tls_from_environment
from kvpool.client.transfer import PageTransferClient
from kvpool.core.addresses import check_endpoint
from kvpool.core.cluster import LiveNode, NodeInfo, NodeKind
from kvpool.core.errors import DeadlineExceeded, InvalidRequest, KvPoolError, ServiceUnavailable
from kvpool_cli.common import Common
from kvpool_cli.errors import CommandFailed, UsageFailed
from kvpool_cli.state import ClusterState, read_state

ResultT = TypeVar("ResultT")

CALL_TIMEOUT_S = 3.0  # a person waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A cluster: where its index is, and its state file if it is an embedded one."""

    index_endpoint: str
    state: ClusterState | None
    tls: TlsCredentials | None = None


def find_tls(common: Common) -> TlsCredentials | None:
    """What the options or the environment say. Raises InvalidRequest."""
    return tls_from_environment(os.environ, common.tls)


def find_target(common: Common) -> Target:
    """The cluster that --index or the state directory names. Raises CommandFailed if there is none."""
    tls = find_tls(common)
    if common.index:
        _check_index(common.index)
        return Target(index_endpoint=common.index, state=None, tls=tls)
    state = read_state(common.state_dir)
    endpoints = [process.endpoints.get("endpoint", "") for process in state.of_role("index")] if state else []
    if state is None or not endpoints or not endpoints[0]:
        raise CommandFailed(
            f"no cluster runs in {common.state_dir}; "
            "start one with `kvpool cluster up`, or name one by --index HOST:PORT"
        )
    return Target(index_endpoint=endpoints[0], state=state, tls=tls)


def _check_index(text: str) -> None:
    """Raises UsageFailed for an address that gRPC would take for another: it adds a port, and wraps one of 99999."""
    try:
        for endpoint in filter(None, text.split(",")) if text.strip(",") else [text]:
            check_endpoint(endpoint, "--index")
    except InvalidRequest as error:
        raise UsageFailed(error.message) from error


def client_config(target: Target) -> ClientConfig:
    """Settings of commands: more patient than an engine, less than an operator."""
    return ClientConfig(
        index_endpoints=tuple(filter(None, target.index_endpoint.split(","))),
        call_timeout_s=CALL_TIMEOUT_S,
        match_timeout_s=CALL_TIMEOUT_S,
        tls=target.tls,
    )


@asynccontextmanager
async def open_index(target: Target) -> AsyncIterator[IndexClient]:
    """A client of the index. Raises CommandFailed if it does not answer."""
    index = IndexClient(client_config(target))
    try:
        yield index
    except ServiceUnavailable as error:
        raise CommandFailed(
            f"the index at {target.index_endpoint} does not answer ({said(error)}); "
            "see that it runs and that the address is right"
        ) from error
    finally:
        await index.close()


def said(error: KvPoolError) -> str:
    """What went wrong, for an operator: to recompute is advice for engines."""
    if type(error) in (ServiceUnavailable, DeadlineExceeded):
        return error.message.removesuffix(f"; {error.advice}")
    return error.message


@asynccontextmanager
async def open_pagestore(target: Target, endpoint: str) -> AsyncIterator[PageStoreControl]:
    """A client of one pagestore's control calls."""
    control = PageStoreControl(endpoint, client_config(target))
    try:
        yield control
    finally:
        await control.close()


@asynccontextmanager
async def open_agent(target: Target, endpoint: str) -> AsyncIterator[AgentControl]:
    """A client of one agent's control calls."""
    control = AgentControl(endpoint, client_config(target))
    try:
        yield control
    finally:
        await control.close()


def open_transfer(target: Target, endpoint: str) -> PageTransferClient:
    """A client of one pagestore's page streams; blocking. Close it."""
    return PageTransferClient(endpoint, metadata=client_config(target).metadata, tls=target.tls)


async def on_every_pagestore(
    target: Target,
    keyspace_name: str,
    call: Callable[[PageStoreControl, bytes], Awaitable[ResultT]],
    node_name: str = "",
) -> list[tuple[LiveNode, ResultT | KvPoolError]]:
    """Call all live pagestores, or the one of that name, at once with the id of the keyspace (empty for no name).

    Returns per node its answer or error. Raises CommandFailed if there is no pagestore or no such keyspace.
    """
    async with open_index(target) as index:
        keyspace = (await keyspace_of_name(index, keyspace_name)).keyspace if keyspace_name else b""
        nodes = await live_pagestores(index, node_name)
    return await on_pagestores(target, nodes, lambda control: call(control, keyspace))


async def live_pagestores(index: IndexClient, name: str = "") -> list[LiveNode]:
    """All of them, or the one called so by node id (the beginning is enough), host id or endpoint.

    Raises CommandFailed if there is none, or more than one is called so.
    """
    nodes = await index.list_nodes(NodeKind.PAGESTORE)
    if not name and nodes:
        return nodes
    if not nodes:
        raise CommandFailed("no pagestore is registered at the index; see `kvpool cluster status`")
    exact = [node for node in nodes if name in (node.info.endpoint, node.info.host_id, node.info.node_id.hex())]
    found = exact or [node for node in nodes if node.info.node_id.hex().startswith(name.lower())]
    if len(found) == 1:
        return found
    known = ", ".join(describe_node(node.info) for node in nodes)
    what = f"{len(found)} pagestores are called" if found else "no live pagestore is called"
    raise CommandFailed(f"{what} {name!r}; live: {known}")


def describe_node(info: NodeInfo) -> str:
    """A node as people may name it."""
    return f"{info.node_id.hex()[:8]} ({info.host_id}, {info.endpoint})"


def describe(node: LiveNode, answer: object) -> dict[str, Any]:
    """What every document of `--json` says of a node that was called."""
    error = said(answer) if isinstance(answer, KvPoolError) else ""
    return {"node_id": node.info.node_id.hex(), "host_id": node.info.host_id, "error": error}


async def on_pagestores(
    target: Target, nodes: Sequence[LiveNode], call: Callable[[PageStoreControl], Awaitable[ResultT]]
) -> list[tuple[LiveNode, ResultT | KvPoolError]]:
    """Call these at once; per node its answer or error.

    A node that hangs is found out by a question that takes no time to answer: what it is asked then may take minutes.
    """

    async def one(node: LiveNode) -> ResultT | KvPoolError:
        try:
            async with open_pagestore(target, node.info.endpoint) as control:
                await control.status(timeout_s=CALL_TIMEOUT_S)
                return await call(control)
        except KvPoolError as error:
            return error

    return list(zip(nodes, await asyncio.gather(*(one(node) for node in nodes)), strict=True))


async def keyspace_of_name(index: IndexClient, name: str) -> NamedKeyspace:
    """The keyspace of that name; an empty name means the only one. Raises CommandFailed naming those there are."""
    found = await keyspaces_of_name(index, name)
    if len(found) == 1:
        return found[0]
    raise CommandFailed(f"name a keyspace; known: {_names(found)}")


async def keyspaces_of_name(index: IndexClient, name: str) -> list[NamedKeyspace]:
    """The keyspace of that name, or all for an empty name. Raises CommandFailed if there is none of that name."""
    keyspaces = await index.list_keyspaces()
    found = [keyspace for keyspace in keyspaces if not name or keyspace.name == name]
    if name and not found:
        raise CommandFailed(f"there is no keyspace {name!r}; known: {_names(keyspaces)}")
    return found


def _names(keyspaces: Sequence[NamedKeyspace]) -> str:
    return ", ".join(keyspace.name for keyspace in keyspaces) or "none yet"


def run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a command's asynchronous part."""
    return asyncio.run(work)
