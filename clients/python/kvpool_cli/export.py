"""`kvpool cache export`: pages of prefixes, or of a whole keyspace, into one portable, verified file."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool import __version__
from kvpool.client.index import IndexClient, OpenedKeyspace
from kvpool.core.cluster import NodeInfo
from kvpool.core.errors import KvPoolError
from kvpool.core.export_format import Manifest, key_check, pages_bytes
from kvpool.core.geometry import AttentionKind
from kvpool.core.keyspace import encode_keyspace, keyspace_id
from kvpool_cli.chains import chain_of
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, CommandFailed
from kvpool_cli.export_file import ExportWriter
from kvpool_cli.export_source import ListedPlan, PageFetcher, PlannedChunk, batches, plan_of_chain
from kvpool_cli.options import Keyspace
from kvpool_cli.output import print_json, say, show
from kvpool_cli.progress import Progress
from kvpool_cli.prompts import TokenSource
from kvpool_cli.quantities import size
from kvpool_cli.targets import (
    Target,
    describe_node,
    find_target,
    keyspace_of_name,
    live_pagestores,
    open_index,
    open_pagestore,
    open_transfer,
    run,
    said,
)

_LIST_TIMEOUT_S = 300.0


@dataclass(slots=True, kw_only=True)
class Exported:
    """What became of an export."""

    output: str
    keyspace: str
    chunk_count: int = 0
    size_bytes: int = 0
    earlier_chunks: int = 0  # were in an unfinished file
    missing_chunks: int = 0  # could not be read, or follow one that could not
    digest: bytes = b""
    failures: dict[str, int] = field(default_factory=dict)


def export(
    common: Common,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="The file to write.")],
    prompts: TokenSource,
    keyspace: Keyspace = "",
    tenant: Annotated[
        str, typer.Option(metavar="NAME", help="The tenant that the cluster takes you for; goes into the file.")
    ] = "default",
) -> int:
    """Write the pages of prompts, or of a keyspace, to one portable verified file.

    `kvpool cache import` takes it elsewhere. It has the longest prefix that the cluster holds of each FILE of tokens,
    or without one the whole keyspace. An interrupted export leaves OUTPUT.partial, and the same command goes on with
    it. Exit code 1 if chunks that were there could not be read; the file is whole in itself even then.
    """
    tokens = prompts.all()
    target = find_target(common)
    manifest, opened, planned = run(_prepare(target, keyspace, tenant, tokens))
    # In this thread and not below an event loop, which would end only with the last page: Ctrl-C must end it at once.
    exported = _write(target, output, manifest, opened, planned)
    if common.json:
        print_json(to_document(exported))
    else:
        show(render(exported))
    return EXIT_FAILED if exported.missing_chunks else EXIT_OK


async def _prepare(
    target: Target, keyspace_name: str, tenant: str, tokens: Sequence[Sequence[int]]
) -> tuple[Manifest, OpenedKeyspace, Sequence[PlannedChunk]]:
    """What the file is of, and what goes into it. raises: CommandFailed if that is nothing."""
    async with open_index(target) as index:
        named = await keyspace_of_name(index, keyspace_name)
        opened = await index.open_keyspace(named.name, named.spec)
        manifest = Manifest(
            name=named.name,
            tenant=tenant,
            spec=named.spec,
            key_check=key_check(opened.hash_key),
            created_by=f"kvpool {__version__}",
        )
        if keyspace_id(encode_keyspace(tenant, named.spec)) != opened.keyspace:
            raise CommandFailed(f"keyspace {named.name} is not of tenant {tenant!r}; name yours by --tenant")
        attention = named.spec.group.attention
        if attention in (AttentionKind.GROUPED_WINDOW, AttentionKind.STATE_SPACE):
            raise CommandFailed(
                f"keyspace {named.name} is of {attention.name} layers, whose chunks are kept without those before "
                f"them; a file has whole chains: export keyspaces of full attention"
            )
        manifest.payload_sizes()  # refused before anything is written
        planned = await _plan(target, index, opened, named.name, tokens)
    if not planned:
        raise CommandFailed(f"the cluster holds nothing of it in keyspace {named.name}; see `kvpool cache match`")
    return manifest, opened, planned


async def _plan(
    target: Target, index: IndexClient, opened: OpenedKeyspace, name: str, tokens: Sequence[Sequence[int]]
) -> list[PlannedChunk]:
    if tokens:
        planned: dict[bytes, PlannedChunk] = {}
        for sequence in tokens:
            for chunk in await plan_of_chain(index, await chain_of(index, name, sequence)):
                planned.setdefault(chunk.chunk_hash, chunk)
        return list(planned.values())

    listed = ListedPlan()

    async def listing(node: NodeInfo) -> None:
        try:
            async with open_pagestore(target, node.endpoint) as control:
                async for chunk in control.list_chunks(opened.keyspace, timeout_s=_LIST_TIMEOUT_S):
                    listed.add(node, chunk)
        except KvPoolError as error:
            raise CommandFailed(f"pagestore {describe_node(node)} does not list its chunks: {said(error)}") from error

    nodes = await live_pagestores(index)
    await asyncio.gather(*(listing(node.info) for node in nodes))
    return listed.planned(opened.grid)


def _write(
    target: Target, output: Path, manifest: Manifest, opened: OpenedKeyspace, planned: Sequence[PlannedChunk]
) -> Exported:
    exported = Exported(output=str(output), keyspace=manifest.name)
    payload_sizes = manifest.payload_sizes()
    chunk_bytes = pages_bytes(payload_sizes, manifest.grid.all_shards)
    writer = ExportWriter(output, manifest)
    try:
        exported.earlier_chunks = len(writer.chain)
        left = [chunk for chunk in planned if chunk.chunk_hash not in writer.chain]
        total_bytes = sum(pages_bytes(payload_sizes, chunk.shards) for chunk in planned)
        progress = Progress("export", total_bytes, done_before_bytes=writer.pages_bytes)
        with PageFetcher(manifest, partial(open_transfer, target)) as fetcher:
            for part in batches(left, chunk_bytes):
                for chunk in fetcher.fetch(part):
                    if chunk is not None and not writer.chain.fault(chunk.chunk_hash, chunk.metadata):
                        writer.add(chunk.chunk_hash, chunk.metadata, chunk.shards, chunk.pages)
                    else:
                        exported.missing_chunks += 1
                    progress.show(writer.pages_bytes)
            exported.failures = fetcher.failures
        progress.end()
        if not len(writer.chain):
            raise CommandFailed(f"no chunk could be read ({_reasons(exported.failures)}); see `kvpool cluster status`")
        exported.digest = writer.finish(opened.hash_key)
        exported.chunk_count, exported.size_bytes = len(writer.chain), writer.pages_bytes
    except KeyboardInterrupt:
        say(f"interrupted: {output}.partial has what was read so far, and the same command goes on with it")
        raise
    finally:
        writer.close()
    return exported


def to_document(exported: Exported) -> dict[str, Any]:
    """The document of `--json`."""
    return {
        "version": 1,
        "output": exported.output,
        "keyspace": exported.keyspace,
        "chunks": exported.chunk_count,
        "page_bytes": exported.size_bytes,
        "earlier_chunks": exported.earlier_chunks,
        "missing_chunks": exported.missing_chunks,
        "failures": exported.failures,
        "digest": exported.digest.hex(),
    }


def render(exported: Exported) -> str:
    """For people."""
    lines = [
        f"{exported.output}: {exported.chunk_count} chunks of {exported.keyspace}, {size(exported.size_bytes)}",
        f"digest {exported.digest.hex()}",
    ]
    if exported.earlier_chunks:
        lines.append(f"{exported.earlier_chunks} of them were there from an export that was interrupted")
    if exported.missing_chunks:
        why = _reasons(exported.failures)
        lines.append(f"{exported.missing_chunks} chunks are not in it ({why}); what is in it can be imported")
    return "\n".join(lines)


def _reasons(failures: dict[str, int]) -> str:
    return ", ".join(f"{count} pages: {why}" for why, count in failures.items()) or "the chunk before them is missing"
