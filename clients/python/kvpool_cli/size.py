"""`kvpool size`: what the KV of a model takes, before anything is bought or started."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpool.connectors.vllm.settings import DEFAULT_CHUNK_TOKENS
from kvpool.core.errors import KvPoolError
from kvpool.core.keyspace import Codec, Dtype, KeyspaceSpec, KvGroup
from kvpool.core.sizing import KeyspaceSize, prepared_segment_bytes
from kvpool_cli.output import EXIT_OK, CommandFailed, print_json, show, size, size_from_text

_DTYPES = {dtype.name.lower().replace("_", "-"): dtype for dtype in Dtype}
_CODECS = {codec.name.lower().replace("_", "-"): codec for codec in Codec}
_CONFIG_NAMES = {"layers": "num_hidden_layers", "kv_heads": "num_key_value_heads", "head_dim": "head_dim"}


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool size`."""
    parser.description = (
        "Say what the KV of a model takes: bytes of a token and of a chunk, how chunks are cut into pages, and how "
        "many tokens a node's memory and disk hold. The model is a config.json of Hugging Face, or its numbers."
    )
    parser.add_argument("config", nargs="?", default="", help="config.json of the model; - is stdin")
    parser.add_argument("--layers", type=int, default=None, help="layers with a KV cache")
    parser.add_argument("--kv-heads", type=int, default=None, help="KV heads of the whole model")
    parser.add_argument("--head-dim", type=int, default=None, help="elements of a head")
    parser.add_argument("--latent-dim", type=int, default=None, help="of MLA, rope part included; no heads then")
    parser.add_argument(
        "--dtype", choices=tuple(_DTYPES), default="bf16", help="of the engine's KV cache (default bf16)"
    )
    parser.add_argument("--codec", choices=tuple(_CODECS), default="raw", help="of the pages (default raw)")
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=DEFAULT_CHUNK_TOKENS,
        help=f"tokens of a chunk (default {DEFAULT_CHUNK_TOKENS}, as of vLLM's connector)",
    )
    parser.add_argument("--arena-bytes", type=size_from_text, default=64 << 30, metavar="SIZE", help="default 64GiB")
    parser.add_argument(
        "--segment-bytes",
        type=size_from_text,
        default=0,
        metavar="SIZE",
        help="of the arena's segments (default: as the pagestore makes them at its start)",
    )
    parser.add_argument("--disk-bytes", type=size_from_text, default=1 << 40, metavar="SIZE", help="default 1TiB")
    parser.add_argument("--json", action="store_true", help="a document for programs")
    parser.set_defaults(run=run_size)


def run_size(arguments: argparse.Namespace) -> int:
    """Print what it takes."""
    config = _read(arguments.config) if arguments.config else {}
    try:
        spec = KeyspaceSpec(
            model_id="size",
            model_revision="1",
            groups=(_group(arguments, config),),
            dtype=_DTYPES[arguments.dtype],
            codec=_CODECS[arguments.codec],
            chunk_tokens=arguments.chunk_tokens,
        )
        segment_bytes = arguments.segment_bytes or prepared_segment_bytes(arguments.arena_bytes)
        document = to_document(KeyspaceSize(spec), arguments.arena_bytes, segment_bytes, arguments.disk_bytes)
    except KvPoolError as error:
        raise CommandFailed(str(error)) from error
    if arguments.json:
        print_json(document)
    else:
        show(render(document))
    return EXIT_OK


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
    most = size(chunk["largest_page_bytes"])
    degrees = f"{', '.join(map(str, chunk['tp_degrees']))}, and multiples of the KV heads"
    lines = [
        f"model    {geometry['layers']} layers, {what}",
        f"token    {size(document['token_bytes'])}",
        f"chunk    {chunk['tokens']} tokens, {size(chunk['staging_bytes'])} in {cut} of {most} at most",
        f"TP       {'any: rank 0 stores, all load' if geometry['latent_dim'] else degrees}",
        f"staging  {size(staging['capacity_bytes'])} hold {staging['tokens']:,} tokens",
        f"disk     {size(disk['capacity_bytes'])} hold {disk['tokens']:,} tokens",
        f"index    {size(document['index']['bytes'])} of Redis for all of these, with one copy of each",
    ]
    if not staging["tokens"]:
        lines.append(f"A page does not fit a segment of {size(staging['segment_bytes'])}: take larger ones")
    return "\n".join(lines)


def _group(arguments: argparse.Namespace, config: Mapping[str, Any]) -> KvGroup:
    """Flags count before the file. raises: CommandFailed naming what is missing; InvalidRequest."""
    layers = _number(arguments, config, "layers")
    latent_dim = arguments.latent_dim
    if latent_dim is None and config.get("kv_lora_rank"):
        latent_dim = int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)
    if latent_dim:
        return KvGroup.mla(layers, latent_dim)
    return KvGroup(layers, _number(arguments, config, "kv_heads"), _number(arguments, config, "head_dim"))


def _number(arguments: argparse.Namespace, config: Mapping[str, Any], name: str) -> int:
    value = getattr(arguments, name) or config.get(_CONFIG_NAMES[name])
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if value is None and name == "kv_heads":
        value = heads
    if value is None and name == "head_dim" and isinstance(heads, int) and isinstance(width, int) and heads > 0:
        value = width // heads
    if not isinstance(value, int):
        flag = "--" + name.replace("_", "-")
        raise CommandFailed(f"{_CONFIG_NAMES[name]} is not known: name the model's config.json, or say {flag}")
    return value


def _read(name: str) -> Mapping[str, Any]:
    """The part of a config.json that is about the language model. raises: CommandFailed."""
    try:
        document = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{name} cannot be read as JSON: {error}") from error
    if not isinstance(document, dict):
        raise CommandFailed(f"{name} is no config.json: want a JSON object")
    text = document.get("text_config")
    config = text if isinstance(text, dict) else document
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention"}:
        raise CommandFailed(f"{name} has layers of {', '.join(sorted(kinds))}: hybrid models are not served")
    return config
