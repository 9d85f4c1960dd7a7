"""What a checkpoint's files say of a model: its configuration, and a digest of its weights for any engine."""

from __future__ import annotations

import hashlib
import json
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvpool.core.errors import InvalidRequest
from kvpool.core.model import ENGINE_CHUNK_TOKENS, ROPE_KEYS, Model, family_name, names_rope_theta

CONFIG_FILE = "config.json"
# Of a config: where it came from and how it is run, not what it computes. Rotary embeddings are part of Model.rope.
NOT_COMPUTED = (
    "_name_or_path",
    "_commit_hash",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    *ROPE_KEYS,
)
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.gguf")
_WINDOWS, _WINDOW_BYTES = 8, 512  # of each tensor
_ROW_BYTES = 64  # of each row of a table of tokens
_FILE_WINDOWS, _FILE_WINDOW_BYTES = 256, 4096  # of a file whose tensors are not known
_HEADER_BYTES_MAX = 100 << 20  # as safetensors has it
_HEADER_LENGTH = struct.Struct("<Q")


def checkpoint_model(
    directory: str | Path,
    *,
    dtype: str = "",
    chunk_tokens: int = ENGINE_CHUNK_TOKENS,
    codec: str = "raw",
    rope: Mapping[str, Any] | None = None,
    quantization: str | None = None,
    adapters: Sequence[str] = (),
    variant: Sequence[Any] = (),
    salt: str | bytes = "",
) -> Model:
    """The model of a Hugging Face checkpoint, as vLLM's and transformers' connectors describe it.

    dtype: of the KV cache; by default the checkpoint's. rope: instead of the config's, see Model; needed where that
    leaves rope_theta to the engine's code, {} for a model without rotary embeddings. raises: InvalidRequest for a
    directory without config or weights, for a geometry that is not plain attention, and without rope_theta.
    """
    config = read_config(Path(directory))
    digest = weights_digest(Path(directory))
    if digest is None:
        raise InvalidRequest(f"{directory} has no weights")
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim") or (width // heads if heads and width else 0)
    if config.get("kv_lora_rank"):
        raise InvalidRequest("the model has MLA: name its geometry with Model(..., latent_dim=)")
    if rope is None and not names_rope_theta(config):
        raise InvalidRequest(
            f"{CONFIG_FILE} of {directory} names no rope_theta, and engines have defaults of their own for "
            f"{config.get('model_type') or 'its model_type'}: name what yours has, as in rope={{'rope_theta': 10000.0}}"
        )
    return Model(
        family_name(config),
        digest,
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads") or heads or 0,
        head_dim=head_dim,
        dtype=dtype or str(config.get("dtype") or config.get("torch_dtype") or "bf16"),
        chunk_tokens=chunk_tokens,
        codec=codec,
        rope=config if rope is None else rope,
        quantization=quantization,
        adapters=adapters,
        variant=variant,
        salt=salt,
    )


def _config(directory: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((directory / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{directory} has no {CONFIG_FILE} that can be read: {error}") from error
    return config


def read_config(directory: Path) -> dict[str, Any]:
    """The (text) model's configuration. raises: InvalidRequest if there is none."""
    config = _config(directory)
    found: dict[str, Any] = config.get("text_config") or config
    return found


def _whole_config(directory: Path) -> dict[str, Any]:
    """The text model's configuration, and what a model of several has beside it. raises: InvalidRequest."""
    config: dict[str, Any] = _config(directory)
    text = config.pop("text_config", None)
    return {**text, "beside text": json.loads(canonical_config(config))} if text else config


def weights_digest(place: Path) -> str | None:
    """32 hex digits over a checkpoint: equal for copies of it, wherever they lie and however they are cut into files.

    Covered: of every tensor in safetensors files its name, element type, shape and 8 windows of 512 bytes, evenly
    spaced, of token embeddings also 64 bytes of each row; of other weight files name, size and 256 windows of 4 KiB; of
    config.json what is computed, rotary embeddings aside (they are part of Model.rope). Other bytes are not read: a
    change that spares all windows of all tensors is not seen, so give weights that were edited by hand a revision of
    their own.

    place: a directory, or one file. None if there are no weights. raises: OSError; InvalidRequest for a damaged file.
    """
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    tensors = sorted(part for path in files if path.suffix == ".safetensors" for part in _tensors(path))
    others: list[bytes] = []
    if not tensors:
        paths = files or sorted({path for pattern in _OTHER_WEIGHTS for path in place.glob(pattern)})
        others = [_sampled_file(path) for path in paths]
    if not tensors and not others:
        return None
    hasher = hashlib.blake2b(digest_size=16, person=b"kvpool weights")
    for part in (*tensors, *others):
        hasher.update(part)
    if (place / CONFIG_FILE).is_file():
        hasher.update(canonical_config(_whole_config(place)))
    return hasher.hexdigest()


def canonical_config(config: Mapping[str, Any]) -> bytes:
    """What of a configuration is computed."""
    computed = {key: value for key, value in config.items() if key not in NOT_COMPUTED and value is not None}
    return json.dumps(computed, sort_keys=True, default=str).encode()


def tensor_windows(size_bytes: int) -> list[range]:
    """The bytes of a tensor that are read, evenly spaced, at multiples of 8."""
    return _windows(size_bytes, _WINDOWS, _WINDOW_BYTES)


def has_a_row_a_token(name: str, shape: Sequence[int]) -> bool:
    """Whether rows of a tensor may have been trained by themselves, as those of tokens that were added."""
    return len(shape) == 2 and all(shape) and ("embed" in name or "wte" in name)


def row_heads(file: BinaryIO, start: int, row_count: int, size_bytes: int) -> bytes:
    """The first bytes of each row of a tensor that begins at `start`: at most 64."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        rows = np.frombuffer(mapped, np.uint8, count=size_bytes, offset=start).reshape(row_count, -1)
        heads = rows[:, :_ROW_BYTES].tobytes()
        del rows  # or the mapping could not be closed
    return heads


def read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """A safetensors file's tensors by name, and where their bytes begin. raises: InvalidRequest for a damaged one."""
    try:
        (length,) = _HEADER_LENGTH.unpack(file.read(_HEADER_LENGTH.size))
        if length > _HEADER_BYTES_MAX:
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    except (ValueError, struct.error) as error:
        raise InvalidRequest(f"{file.name} is not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header, _HEADER_LENGTH.size + length


def _tensors(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        header, base = read_header(file)
        for name, tensor in header.items():
            begin, end = tensor["data_offsets"]
            hasher = hashlib.blake2b(digest_size=16)
            for window in tensor_windows(end - begin):
                file.seek(base + begin + window.start)
                hasher.update(file.read(len(window)))
            if has_a_row_a_token(name, tensor["shape"]):
                hasher.update(row_heads(file, base + begin, tensor["shape"][0], end - begin))
            yield json.dumps([name, tensor["dtype"], tensor["shape"], hasher.hexdigest()]).encode()


def _sampled_file(path: Path) -> bytes:
    size_bytes = path.stat().st_size
    hasher = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        for window in _windows(size_bytes, _FILE_WINDOWS, _FILE_WINDOW_BYTES):
            file.seek(window.start)
            hasher.update(file.read(len(window)))
    return json.dumps([path.name, size_bytes, hasher.hexdigest()]).encode()


def _windows(size_bytes: int, count: int, window_bytes: int) -> list[range]:
    if size_bytes <= count * window_bytes:
        return [range(size_bytes)]
    last = size_bytes - window_bytes
    starts = [last * number // (count - 1) // 8 * 8 for number in range(count)]
    return [range(start, start + window_bytes) for start in starts]
