"""KV geometry of a model and the layout identity of bytes that cannot be taken apart."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvpool.core.errors import InvalidRequest

_MAX_COUNT = (1 << 31) - 1
_MAX_NAME_BYTES = 1024


def check_count(name: str, value: object, lowest: int = 1, highest: int = _MAX_COUNT) -> None:
    """raises: InvalidRequest naming the argument unless it is an int in [lowest, highest]."""
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise InvalidRequest(f"{name} must be an integer in [{lowest}, {highest}], got {value!r}")


def check_name(name: str, value: object, *, may_be_empty: bool = False) -> None:
    """raises: InvalidRequest naming the argument unless it is a string of 1 to 1024 bytes in UTF-8."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {type(value).__name__}")
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} is not valid Unicode") from None
    if size_bytes > _MAX_NAME_BYTES or (not size_bytes and not may_be_empty):
        raise InvalidRequest(f"{name} must have 1 to {_MAX_NAME_BYTES} bytes, got {size_bytes}")


class AttentionKind(IntEnum):
    """What a token of the group attends to. The numbers are those of the wire and of the canonical encoding.

    SLIDING_WINDOW: to a window, in all layers of the model. Some readers take whole chains of chunks all the same.
    STATE_SPACE: to a state of fixed size, whatever computes it. A chunk is the state after its last token.
    GROUPED_WINDOW: to a window, in a model with other groups of layers; readers take the chunks that the window before
    a boundary reaches, and no others.
    """

    FULL = 1
    SLIDING_WINDOW = 2
    STATE_SPACE = 3
    GROUPED_WINDOW = 4


class PayloadKind(IntEnum):
    """How payload bytes are arranged: see `payload`."""

    CANONICAL = 1
    OPAQUE = 2


PAGES_MAX = 256
"""Of a chunk: their hashes differ in one byte."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers of equal KV geometry.

    kv_heads:   of the whole model, never divided by TP.
    latent_dim: > 0 means MLA: one plane of one head with latent_dim elements (for DeepSeek 512 + 64 = 576), where
                kv_heads is 1 and head_dim 0; otherwise K and V planes of kv_heads heads with head_dim elements each.
    pages:      of a chunk, where an engine keeps layers of one kind in several groups, of `layers` layers each:
                consecutive chunks of a chain, which are one chunk of the prompt.
    """

    layers: int
    kv_heads: int
    head_dim: int
    attention: AttentionKind = AttentionKind.FULL
    window_tokens: int = 0
    latent_dim: int = 0
    pages: int = 1

    def __post_init__(self) -> None:
        check_count("groups.layers", self.layers, highest=0xFFFF)
        check_count("groups.kv_heads", self.kv_heads, highest=0xFFFF)
        check_count("groups.window_tokens", self.window_tokens, lowest=0)
        check_count("groups.pages", self.pages, lowest=1, highest=PAGES_MAX)
        check_count("groups.latent_dim", self.latent_dim, lowest=0, highest=0xFFFFFF)
        check_count("groups.head_dim", self.head_dim, lowest=0, highest=0xFFFFFF)
        if not isinstance(self.attention, AttentionKind):
            raise InvalidRequest(f"groups.attention must be an AttentionKind, got {self.attention!r}")
        if self.latent_dim and (self.kv_heads != 1 or self.head_dim):
            raise InvalidRequest(
                f"groups: MLA (latent_dim {self.latent_dim}) wants kv_heads 1 and head_dim 0, "
                f"got {self.kv_heads} and {self.head_dim}"
            )
        if not self.latent_dim and not self.head_dim:
            raise InvalidRequest("groups.head_dim must be > 0 unless latent_dim is set")

    @classmethod
    def mla(cls, layers: int, latent_dim: int) -> KvGroup:
        """Geometry of multi-head latent attention."""
        return cls(layers=layers, kv_heads=1, head_dim=0, latent_dim=latent_dim)

    @property
    def planes(self) -> int:
        """Tensors of a layer in canonical payload: K and V, or the latent alone."""
        return 1 if self.latent_dim else 2

    @property
    def row_elements(self) -> int:
        """Elements of one token and head in one plane."""
        return self.latent_dim or self.head_dim


@dataclass(frozen=True, slots=True)
class OpaqueLayout:
    """Identity of engine bytes that cannot be taken apart: only equal layouts may exchange them.

    layout_id:    the engine's own name of the arrangement inside a cell.
    isa:          instruction set the arrangement depends on; may be empty.
    block_tokens: tokens of one engine block.
    cell_bytes:   bytes of one (layer, block, head) cell, K and V together.
    """

    engine: str
    layout_id: str
    isa: str
    block_tokens: int
    cell_bytes: int

    def __post_init__(self) -> None:
        check_name("opaque.engine", self.engine)
        check_name("opaque.layout_id", self.layout_id)
        check_name("opaque.isa", self.isa, may_be_empty=True)
        check_count("opaque.block_tokens", self.block_tokens)
        check_count("opaque.cell_bytes", self.cell_bytes)
