"""Pulls of tokens from other ranks' caches: which rows they mean, and refusals before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.core.errors import InvalidRequest, KeyspaceMismatch
from kvpool.core.ipc import EngineEvent
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout, RowPlane
from kvpool.core.plane_table import PLANE_COLUMNS

Int64s = npt.NDArray[np.int64]

SESSION_ID_BYTES = 16
MAX_PULLS = 4096
MAX_PULLED_TOKENS = 1 << 20
MAX_SOURCES = 64
_MAX_WAIT_MS = 3_600_000
_MAX_COUNTED_SLOTS = 1 << 22


@dataclass(frozen=True, slots=True)
class SourceName:
    """A source rank: its session, and the socket of its agent ("unix:/path"); empty for this agent."""

    session_id: bytes
    agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPull:
    """Tokens of one request from one source rank, as the wire's PeerPull has them; not checked yet."""

    source: SourceName
    source_block_ids: bytes
    source_first_token: int
    destination_block_ids: bytes
    destination_first_token: int
    token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPull:
    """What PeerPull asks for; not checked yet."""

    pull_id: int
    pulls: tuple[TokenPull, ...]
    after: EngineEvent | None
    wait_ms: int
    partial: bool


@dataclass(frozen=True, slots=True)
class PullCells:
    """Rows that a pull copies: of model layers x heads that both ranks have, for tokens.

    slots: [T, 2] int64, row slots of the source and of the destination: block * rows of a block + row.
    """

    layers: range
    heads: range
    slots: Int64s


def check_wanted(wanted: WantedPull) -> None:
    """What can be said without knowing the sources. Raises InvalidRequest."""
    if wanted.pull_id <= 0:
        raise InvalidRequest(f"pull_id must be > 0, got {wanted.pull_id}")
    if not 0 <= wanted.wait_ms <= _MAX_WAIT_MS:
        raise InvalidRequest(f"wait_ms must lie in [0, {_MAX_WAIT_MS}], got {wanted.wait_ms}")
    if not 0 < len(wanted.pulls) <= MAX_PULLS:
        raise InvalidRequest(f"pulls must be 1 to {MAX_PULLS}, got {len(wanted.pulls)}")
    for number, pull in enumerate(wanted.pulls):
        if len(pull.source.session_id) != SESSION_ID_BYTES:
            raise _refusal(number, f"source_session_id must have {SESSION_ID_BYTES} bytes")
        if pull.source.agent and not pull.source.agent.startswith("unix:"):
            raise _refusal(number, "source_agent must be unix:/path, for an agent of this host, or empty")
        if pull.token_count <= 0:
            raise _refusal(number, f"token_count must be > 0, got {pull.token_count}")
    tokens = sum(pull.token_count for pull in wanted.pulls)
    if tokens > MAX_PULLED_TOKENS:
        raise InvalidRequest(f"pulls have {tokens} tokens, at most {MAX_PULLED_TOKENS} are allowed; split the request")
    sources = len({pull.source for pull in wanted.pulls})
    if sources > MAX_SOURCES:
        raise InvalidRequest(f"pulls name {sources} sources, at most {MAX_SOURCES} are allowed; split the request")


def check_source(number: int, keyspace: bytes, source: EngineLayout, own_keyspace: bytes, own: EngineLayout) -> None:
    """Whether rows of a source may be copied as they are. Raises KeyspaceMismatch, InvalidRequest naming the pull."""
    if keyspace != own_keyspace:
        raise KeyspaceMismatch(f"pulls[{number}].source_session_id has another keyspace than the destination")
    kinds = [bool(layout.layers[0].scales) for layout in (source, own)]
    if kinds[0] != kinds[1]:
        names = ["rows as the codec has them", "rows as the model has them"]
        raise _refusal(
            number, f"source_session_id: its cache holds {names[not kinds[0]]}, the destination's {names[not kinds[1]]}"
        )


def cells_of(number: int, pull: TokenPull, spec: KeyspaceSpec, source: EngineLayout, own: EngineLayout) -> PullCells:
    """The rows of one pull. Raises InvalidRequest naming it and the argument."""
    layers = _common(source.layer_range, own.layer_range)
    heads = _common(source.head_range, own.head_range)
    for name, common, theirs, ours in (
        ("layers", layers, source.layer_range, own.layer_range),
        ("heads", heads, source.head_range, own.head_range),
    ):
        if not common:
            raise _refusal(
                number,
                f"source_session_id: the source has {name} [{theirs.start}, {theirs.stop}), the destination "
                f"[{ours.start}, {ours.stop}): none in common",
            )
    slots = [
        _slots(number, side, spec, layout, ids, first, pull.token_count)
        for side, layout, ids, first in (
            ("source", source, pull.source_block_ids, pull.source_first_token),
            ("destination", own, pull.destination_block_ids, pull.destination_first_token),
        )
    ]
    return PullCells(layers, heads, np.stack(slots, axis=1))


def check_writes(cells: Sequence[PullCells], own: EngineLayout, *, partial: bool) -> None:
    """No cell is written twice, and unless partial no token is left without some. Raises InvalidRequest."""
    groups: dict[tuple[range, range], list[int]] = {}
    for number, each in enumerate(cells):
        groups.setdefault((each.layers, each.heads), []).append(number)
    places = _places(cells)
    count = 1 + max(int(each.max()) for each in places)
    area = np.zeros(count, dtype=np.int64)
    seen: list[tuple[range, range, Int64s]] = []
    for (layers, heads), numbers in groups.items():
        counts = np.bincount(np.concatenate([places[number] for number in numbers]), minlength=count)
        twice = counts > 1
        for other_layers, other_heads, others in seen:
            if _common(layers, other_layers) and _common(heads, other_heads):
                twice |= (counts > 0) & (others > 0)
        if twice.any():
            number, slot = _first_with(cells, places, numbers[::-1], twice)
            raise _refusal(
                number, f"destination_block_ids: slot {slot} is written twice; destinations must be distinct"
            )
        seen.append((layers, heads, counts))
        area += counts * (len(layers) * len(heads))
    full = len(own.layer_range) * len(own.head_range)
    missing = (area > 0) & (area < full)
    if not partial and missing.any():
        number, slot = _first_with(cells, places, range(len(cells)), missing)
        raise _refusal(
            number,
            f"destination_block_ids: slot {slot} would get only {int(area[missing][0])} of {full} (layer, head) "
            f"cells; name sources for the others, or set partial",
        )


def _places(cells: Sequence[PullCells]) -> list[Int64s]:
    """The destination slots, as small numbers: caches may have very many."""
    slots = [each.slots[:, 1] for each in cells]
    if max(int(each.max()) for each in slots) < _MAX_COUNTED_SLOTS:
        return slots
    _, numbers = np.unique(np.concatenate(slots), return_inverse=True)
    return np.split(numbers.astype(np.int64, copy=False), np.cumsum([each.size for each in slots])[:-1])


def _first_with(
    cells: Sequence[PullCells], places: Sequence[Int64s], numbers: Sequence[int], wrong: npt.NDArray[np.bool_]
) -> tuple[int, int]:
    """The first pull with a destination slot that is wrong, and that slot."""
    number = next(number for number in numbers if wrong[places[number]].any())
    return number, int(cells[number].slots[wrong[places[number]], 1][0])


def _slots(
    number: int, side: str, spec: KeyspaceSpec, layout: EngineLayout, packed: bytes, first_token: int, count: int
) -> Int64s:
    """Row slots of consecutive tokens; an opaque cell is a row."""
    block_tokens = layout.block_tokens
    if not 0 <= first_token < block_tokens:
        raise _refusal(number, f"{side}_first_token must lie in [0, {block_tokens}), got {first_token}")
    if spec.opaque and (first_token or count % block_tokens):
        raise _refusal(
            number, f"token_count and {side}_first_token must be multiples of {block_tokens}: cells are whole"
        )
    if len(packed) % 8:
        raise _refusal(number, f"{side}_block_ids must be little-endian int64, got {len(packed)} bytes")
    needed = -(-(first_token + count) // block_tokens)
    if len(packed) < 8 * needed:
        raise _refusal(number, f"{side}_block_ids has {len(packed) // 8} blocks, the tokens need {needed}")
    blocks = np.frombuffer(packed, dtype="<i8", count=needed).astype(np.int64, copy=False)
    if int(blocks.min()) < 0 or int(blocks.max()) >= layout.block_count:
        wrong = next(int(block) for block in blocks if not 0 <= block < layout.block_count)
        raise _refusal(number, f"{side}_block_ids must lie in [0, {layout.block_count}), got {wrong}")
    if spec.opaque or block_tokens == 1:
        return blocks
    rows = blocks[:, np.newaxis] * block_tokens + np.arange(block_tokens)
    return rows.reshape(-1)[first_token : first_token + count]


def _common(left: range, right: range) -> range:
    start = max(left.start, right.start)
    return range(start, max(start, min(left.stop, right.stop)))


def _refusal(number: int, text: str) -> InvalidRequest:
    return InvalidRequest(f"pulls[{number}].{text}", item_index=number)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PeerPlanes:
    """Planes of one row size, layer by layer.

    source, destination: [P, 8] int64: address of (block 0, row 0, first common head); block, row and head stride; 0.
    """

    source: Int64s
    destination: Int64s
    heads: int
    row_bytes: int
    source_block_rows: int
    destination_block_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class CacheSide:
    """One rank's cache: addresses of its handles' first bytes, as one GPU sees them."""

    layout: EngineLayout
    addresses: Sequence[int]


def peer_planes(
    spec: KeyspaceSpec, layers: range, heads: range, source: CacheSide, destination: CacheSide
) -> tuple[PeerPlanes, PeerPlanes | None]:
    """Data planes, and scale planes if both caches have some. layers, heads: of the model, that both sides have."""
    data = _planes_of(spec, layers, heads, source, destination, "planes")
    if not source.layout.layers[0].scales:
        return data, None
    return data, _planes_of(spec, layers, heads, source, destination, "scales")


def _planes_of(
    spec: KeyspaceSpec, layers: range, heads: range, source: CacheSide, destination: CacheSide, kind: str
) -> PeerPlanes:
    sides = [_rows(spec, layers, heads, side, kind) for side in (source, destination)]
    plane: RowPlane = getattr(source.layout.layers[0], kind)[0]
    return PeerPlanes(
        source=sides[0],
        destination=sides[1],
        heads=len(heads),
        row_bytes=plane.row_bytes,
        source_block_rows=source.layout.rows_of_block(spec),
        destination_block_rows=destination.layout.rows_of_block(spec),
    )


def _rows(spec: KeyspaceSpec, layers: range, heads: range, side: CacheSide, kind: str) -> Int64s:
    layout = side.layout
    first_head = heads.start - layout.first_head
    rows: list[tuple[int, ...]] = []
    for layer in layers:
        planes: tuple[RowPlane, ...] = getattr(layout.layers[layer - layout.first_layer], kind)
        for plane in planes:
            # A stride along which there is one item counts for nothing, also not for how wide a copy may be.
            rows.append(
                (
                    side.addresses[plane.handle] + plane.offset_bytes + first_head * plane.head_stride_bytes,
                    plane.block_stride_bytes if layout.block_count > 1 else 0,
                    plane.token_stride_bytes if layout.rows_of_block(spec) > 1 else 0,
                    plane.head_stride_bytes if len(heads) > 1 else 0,
                )
            )
    table = np.zeros((len(rows), PLANE_COLUMNS), dtype=np.int64)
    table[:, :4] = rows
    return table
