"""`kvpool cache import`: stores the pages of an exported file, once all of it was verified."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpool.client.index import OpenedKeyspace
from kvpool.core.errors import ExportRefused
from kvpool.core.export_format import End, Manifest, key_check, mac_of
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, UsageFailed
from kvpool_cli.export_file import ExportReader, FileChunk
from kvpool_cli.import_target import ImportTarget, Placed
from kvpool_cli.output import print_json, show
from kvpool_cli.progress import Progress
from kvpool_cli.quantities import size
from kvpool_cli.targets import Target, find_target, open_index, run

_BATCH_BYTES = 64 << 20


@dataclass(slots=True, kw_only=True)
class Imported:
    """What became of an import."""

    manifest: Manifest
    end: End
    marks: Sequence[bytes]
    name: str = ""
    stored_chunks: int = 0
    present_chunks: int = 0
    expired_chunks: int = 0
    failed_chunks: int = 0
    failures: dict[str, int] = field(default_factory=dict)


def import_pages(
    common: Common,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `kvpool cache export` wrote.")],
    keyspace: Annotated[
        str,
        typer.Option("--keyspace", "-k", metavar="NAME", help="Its name here (default: as where it was exported)."),
    ] = "",
    copies: Annotated[int, typer.Option(metavar="N", min=1, max=16, help="Nodes to store each page on.")] = 1,
    keep_pins: Annotated[
        bool, typer.Option("--keep-pins", help="Pins come along, as far as the nodes allow them.")
    ] = False,
    digest: Annotated[
        str | None, typer.Option(metavar="HEX", help="Refuse a file with another digest than `export` printed.")
    ] = None,
    verify_only: Annotated[
        bool, typer.Option("--verify-only", help="Verify the file and store nothing; needs no cluster.")
    ] = False,
) -> int:
    """Store the pages of an exported file, once all of it is verified.

    Chunks that the cluster has are left as they are, so a command that was interrupted may just be repeated. Time to
    live and priority come along; pins only with --keep-pins. Exit code 1 for a file that is refused, or if any of its
    chunks could not be stored.
    """
    if digest == "":  # as a shell's variable that was never set
        raise UsageFailed("--digest is empty; give the digest that `export` printed, or leave the option out")
    target = None if verify_only else find_target(common)
    imported = _verified(file, digest)
    if target is not None:
        run(_import(target, file, imported, keyspace, copies=copies, keep_pins=keep_pins))
    if common.json:
        print_json(to_document(imported, verify_only))
    else:
        show(render(imported, verify_only))
    return EXIT_FAILED if imported.failed_chunks else EXIT_OK


def _verified(path: Path, digest: str | None) -> Imported:
    """What a whole file says of itself. digest: None takes any. raises: ExportRefused."""
    with ExportReader(path) as reader:
        progress = Progress("verify", reader.size_bytes)
        for _ in reader.chunks():
            progress.show(reader.good_bytes)
        progress.end()
        assert reader.end is not None
        if digest is not None and reader.end.digest.hex() != digest.lower():
            raise ExportRefused(f"{path} has the digest {reader.end.digest.hex()} and not the one that was named")
        return Imported(manifest=reader.manifest, end=reader.end, marks=reader.marks)


async def _import(
    target: Target, file: Path, imported: Imported, keyspace_name: str, *, copies: int, keep_pins: bool
) -> None:
    manifest = imported.manifest
    imported.name = keyspace_name or manifest.name
    async with open_index(target) as index:
        opened = await index.open_keyspace(imported.name, manifest.spec)
        check_ours(manifest, imported.end, opened)
        async with ImportTarget(target, index, opened, manifest.spec, copies) as into:
            await _store(into, file, imported, keep_pins=keep_pins)


def check_ours(manifest: Manifest, end: End, opened: OpenedKeyspace) -> None:
    """raises: ExportRefused for a file of another tenant, another tenant secret, or that was forged."""
    if opened.keyspace != manifest.keyspace:
        raise ExportRefused(
            f"the file is of tenant {manifest.tenant!r} and its keyspace has another id here: "
            "pages are never carried from one tenant to another"
        )
    if key_check(opened.hash_key) != manifest.key_check:
        raise ExportRefused(
            "the file was exported under another tenant secret, so its chunks have other hashes than here; "
            "give both clusters the same secret, or let engines compute the prefixes again"
        )
    if mac_of(opened.hash_key, end.digest, end.chunk_count, end.pages_bytes) != end.mac:
        raise ExportRefused("the file was not written by who knows the tenant secret (its MAC is wrong): it is forged")


async def _store(into: ImportTarget, file: Path, imported: Imported, *, keep_pins: bool) -> None:
    await into.look()
    with ExportReader(file, read_before=imported.marks) as reader:
        if reader.manifest != imported.manifest:
            raise ExportRefused(f"{file} was changed while it was read; import it again")
        progress = Progress("import", reader.size_bytes)
        batches = _batches(reader)
        while (batch := await asyncio.to_thread(next, batches, None)) is not None:
            for placed in await into.store([_kept(chunk, keep_pins) for chunk in batch]):
                _count(imported, placed)
            progress.show(reader.good_bytes)
        progress.end()
        if reader.end != imported.end:
            raise ExportRefused(f"{file} was changed after its last page; what was stored is whole")
    await into.finish()
    imported.failures = dict(into.failures)


def _kept(chunk: FileChunk, keep_pins: bool) -> FileChunk:
    """Without its pin, unless that is wanted."""
    if keep_pins or not chunk.metadata.pinned_until_us:
        return chunk
    return replace(chunk, metadata=replace(chunk.metadata, pinned_until_us=0))


def _batches(reader: ExportReader) -> Iterator[Sequence[FileChunk]]:
    batch: list[FileChunk] = []
    batch_bytes = 0
    for chunk in reader.chunks():
        batch.append(chunk)
        batch_bytes += sum(map(len, chunk.pages))
        if batch_bytes >= _BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def _count(imported: Imported, placed: Placed) -> None:
    if placed is Placed.STORED:
        imported.stored_chunks += 1
    elif placed is Placed.PRESENT:
        imported.present_chunks += 1
    elif placed is Placed.EXPIRED:
        imported.expired_chunks += 1
    else:
        imported.failed_chunks += 1


def to_document(imported: Imported, verify_only: bool) -> dict[str, Any]:
    """The document of `--json`."""
    return {
        "version": 1,
        "verified_only": verify_only,
        "keyspace": imported.name or imported.manifest.name,
        "keyspace_id": imported.manifest.keyspace.hex(),
        "model_id": imported.manifest.spec.model_id,
        "created_by": imported.manifest.created_by,
        "chunks": imported.end.chunk_count,
        "page_bytes": imported.end.pages_bytes,
        "digest": imported.end.digest.hex(),
        "stored_chunks": imported.stored_chunks,
        "present_chunks": imported.present_chunks,
        "expired_chunks": imported.expired_chunks,
        "failed_chunks": imported.failed_chunks,
        "failures": imported.failures,
    }


def render(imported: Imported, verify_only: bool) -> str:
    """For people."""
    manifest, end = imported.manifest, imported.end
    lines = [
        f"{end.chunk_count} chunks, {size(end.pages_bytes)}: every byte verified",
        f"of {manifest.spec.model_id}@{manifest.spec.model_revision}, exported by {manifest.created_by}",
        f"digest {end.digest.hex()}",
    ]
    if verify_only:
        return "\n".join(lines)
    lines.append(
        f"keyspace {imported.name}: {imported.stored_chunks} chunks stored, {imported.present_chunks} were there"
        + (f", {imported.expired_chunks} had expired" if imported.expired_chunks else "")
    )
    if imported.failed_chunks:
        why = ", ".join(f"{count} chunks: {reason}" for reason, count in imported.failures.items())
        lines.append(f"{imported.failed_chunks} chunks could not be stored ({why}); mend that and import again")
    return "\n".join(lines)
