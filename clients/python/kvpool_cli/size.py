"""`kvpool size`: what the KV of a model takes, before anything is bought or started."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from kvpool.core.errors import KvPoolError
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup
from kvpool.core.model import ENGINE_CHUNK_TOKENS
from kvpool.core.sizing import KeyspaceSize, prepared_segment_bytes
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_OK, CommandFailed
from kvpool_cli.options import size_option
from kvpool_cli.output import print_json, show
from kvpool_cli.quantities import size as size_text

ValueT = TypeVar("ValueT", Dtype, Codec)

_DTYPES = {dtype.name.lower().replace("_", "-"): dtype for dtype in Dtype}
_CODECS = {codec.name.lower().replace("_", "-"): codec for codec in Codec}
_CONFIG_NAMES = {"layers": "num_hidden_layers", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}


_DtypeOption = typer.Option(
    parser=lambda text: _named(_DTYPES, text),
    metavar="DTYPE",
    help=f"Of the engine's KV cache: {', '.join(_DTYPES)} (default bf16).",
    show_default=False,
)
_CodecOption = typer.Option(
    parser=lambda text: _named(_CODECS, text),
    metavar="CODEC",
    help=f"Of the pages: {', '.join(_CODECS)} (default raw).",
    show_default=False,
)


def size(
    common: Common,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="config.json of the model; - is stdin.")] = "",
    layers: Annotated[int | None, typer.Option(metavar="N", help="Layers with a KV cache.")] = None,
    kv_heads: Annotated[int | None, typer.Option(metavar="N", help="KV heads of the whole model.")] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", help="Elements of a head.")] = None,
    latent_dim: Annotated[
        int | None, typer.Option(metavar="N", help="Of MLA, rope part included; no heads then.")
    ] = None,
    dtype: Annotated[Dtype, _DtypeOption] = Dtype.BF16,
    codec: Annotated[Codec, _CodecOption] = Codec.RAW,
    chunk_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a chunk, by default as of vLLM's connector.")
    ] = ENGINE_CHUNK_TOKENS,
    arena_bytes: Annotated[int, size_option("--arena-bytes", "Staging memory (default 64GiB).")] = 64 << 30,
    segment_bytes: Annotated[
        int, size_option("--segment-bytes", "Of the arena's segments (default: as the pagestore makes them).")
    ] = 0,
    disk_bytes: Annotated[int, size_option("--disk-bytes", "Disk tier (default 1TiB).")] = 1 << 40,
) -> int:
    """Show what the KV of a model takes, and how many tokens a node holds.

    Bytes of a token and of a chunk, how chunks are cut into pages, and how many tokens a node's memory and disk hold.
    The model is a config.json of Hugging Face, or its numbers.
    """
    model = _Model(_read(config) if config else {}, layers, kv_heads, head_dim, latent_dim)
    try:
        spec = KeyspaceSpec(
            model_id="size",
            model_revision="1",
            groups=(model.group(),),
            dtype=dtype,
            codec=codec,
            chunk_tokens=chunk_tokens,
        )
        segments = segment_bytes or prepared_segment_bytes(arena_bytes)
        document = to_document(KeyspaceSize(spec), arena_bytes, segments, disk_bytes)
    except KvPoolError as error:
        raise CommandFailed(str(error)) from error
    if common.json:
        print_json(document)
    else:
        show(render(document))
    return EXIT_OK


def _named(values: Mapping[str, ValueT], text: str | ValueT) -> ValueT:
    if not isinstance(text, str):
        return text
    if text not in values:
        raise ValueError(f"{text!r} is not one of {', '.join(values)}")
    return values[text]


def to_document(sizes: KeyspaceSize, arena_bytes: int, segment_bytes: int, disk_bytes: int) -> dict[str, Any]:
    """The document of `--json`."""
    grid, group = sizes.grid, sizes.spec.group
    staging_tokens = sizes.staging_tokens(arena_bytes, segment_bytes)
    disk_tokens = sizes.disk_tokens(disk_bytes)
    return {
        "version": 1,
        "geometry": {
            "layers": group.layers,
            "kv_heads": group.kv_heads,
            "head_dim": group.head_dim,
            "latent_dim": group.latent_dim,
        },
        "token_bytes": sizes.token_bytes,
        "chunk": {
            "tokens": sizes.spec.chunk_tokens,
            "pages": grid.all_shards.bit_count(),
            "layer_groups": grid.layer_groups,
            "splits": list(grid.splits),
            "tp_degrees": list(sizes.tp_degrees),
            "largest_page_bytes": sizes.largest_page_bytes,
            "staging_bytes": sizes.chunk_staging_bytes,
            "disk_bytes": sizes.chunk_disk_bytes,
        },
        "staging": {"capacity_bytes": arena_bytes, "segment_bytes": segment_bytes, "tokens": staging_tokens},
        "disk": {"capacity_bytes": disk_bytes, "tokens": disk_tokens},
        "index": {"bytes": sizes.index_bytes(staging_tokens + disk_tokens)},
    }


def render(document: Mapping[str, Any]) -> str:
    """The same for people."""
    chunk, geometry, staging, disk = (document[name] for name in ("chunk", "geometry", "staging", "disk"))
    what = (
        f"MLA of {geometry['latent_dim']}"
        if geometry["latent_dim"]
        else f"{geometry['kv_heads']} KV heads of {geometry['head_dim']}"
    )
    cut = f"{chunk['pages']} pages ({chunk['layer_groups']} layer groups x {chunk['splits'][0]} parts of the heads)"
    most = size_text(chunk["largest_page_bytes"])
    degrees = f"{', '.join(map(str, chunk['tp_degrees']))}, and multiples of the KV heads"
    lines = [
        f"model    {geometry['layers']} layers, {what}",
        f"token    {size_text(document['token_bytes'])}",
        f"chunk    {chunk['tokens']} tokens, {size_text(chunk['staging_bytes'])} in {cut} of {most} at most",
        f"TP       {'any: rank 0 stores, all load' if geometry['latent_dim'] else degrees}",
        f"staging  {size_text(staging['capacity_bytes'])} hold {staging['tokens']:,} tokens",
        f"disk     {size_text(disk['capacity_bytes'])} hold {disk['tokens']:,} tokens",
        f"index    {size_text(document['index']['bytes'])} of Redis for all of these, with one copy of each",
    ]
    if not staging["tokens"]:
        lines.append(f"A page does not fit a segment of {size_text(staging['segment_bytes'])}: take larger ones")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Model:
    """Options count before the config file."""

    config: Mapping[str, Any]
    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    latent_dim: int | None

    def group(self) -> KvGroup:
        """raises: CommandFailed naming what is missing; InvalidRequest."""
        layers, latent_dim = self._number("layers"), self.latent_dim
        if latent_dim is None and self.config.get("kv_lora_rank"):
            latent_dim = int(self.config["kv_lora_rank"]) + int(self.config.get("qk_rope_head_dim") or 0)
        if latent_dim:
            return KvGroup.mla(layers, latent_dim)
        return KvGroup(layers, self._number("kv_heads"), self._number("head_dim"))

    def _number(self, name: str) -> int:
        value = getattr(self, name) or self.config.get(_CONFIG_NAMES[name])
        heads, width = self.config.get("num_attention_heads"), self.config.get("hidden_size")
        if value is None and name == "kv_heads":
            value = heads
        if value is None and name == "head_dim" and isinstance(heads, int) and isinstance(width, int) and heads > 0:
            value = width // heads
        if not isinstance(value, int):
            flag = "--" + name.replace("_", "-")
            raise CommandFailed(f"{_CONFIG_NAMES[name]} is not known: name the model's config.json, or give {flag}")
        return value


def _read(name: str) -> Mapping[str, Any]:
    """The part of a config.json that is about the language model. raises: CommandFailed."""
    try:
        document = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{name} cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise CommandFailed(f"{name} is not a config.json: want a JSON object")
    text = document.get("text_config")
    config = text if isinstance(text, dict) else document
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise CommandFailed(
            f"{name} has layers of {', '.join(sorted(kinds))}, and `kvpool size` computes full attention only; "
            "give --layers, --kv-heads and --head-dim of the layers with full attention instead of the file"
        )
    return config
