"""A bounded copy of what the index knows of chunks, fed by a watch and by answered matches: the part that decides.

It answers with what it knows to be there, and says of whole chain groups that they are stored nowhere. What makes that
safe:

- Events of a chunk carry versions; the higher one counts. Versions that must be forgotten (evicted chunks, removed
  ones) leave a floor, and an event that cannot be ordered against it adds nothing and may remove.
- An answer of the index carries no version. It is learned only where no event touched the chunk's group since the
  question was sent: the index read its store after that, so that every change it did not see is still to come.
- A RESYNC empties the table. Without a recent heartbeat nothing in it is used.
- Locations name nodes with incarnations, and only nodes that are alive count.
- A group is absent if neither a listing of the store, begun after the RESYNC, nor an event since has named it, and a
  heartbeat says that all events of the log up to a moment ago have come: see stored_groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from kvpool.core.cluster import (
    ChainMatch,
    ChainQuery,
    ChunkBatch,
    ChunkEvent,
    HeartbeatEvent,
    IndexEvent,
    Location,
    MatchRun,
    NodeEvent,
    NodeInfo,
    ResyncEvent,
)
from kvpool.core.coverage import Coverage
from kvpool.core.grid import ShardGrid
from kvpool_server.node.replica_groups import FIELD_BYTES, HASH_BYTES, GroupStore, parts
from kvpool_server.node.replica_values import Lens, merged
from kvpool_server.node.stored_groups import GroupListing, StoredGroups

NOTHING = ChainMatch(matched_chunks=0)

_TOUCHED_MAX = 65536
_LENSES_MAX = 64
_FILTER_SHARE = 32  # of its capacity, the filter of stored groups takes as much more; twice that while it is renewed


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that is on its way to the index; only what was still true when it began may be learned from it."""

    epoch: int
    stamp: int


class ReplicaTable:
    """See the module. Belongs to one thread; time is passed in."""

    def __init__(self, *, capacity_bytes: int, max_lag_s: float, max_absence_lag_s: float = 1.5) -> None:
        """max_lag_s: how old the last look at the end of the log may be for anything to be used; max_absence_lag_s: for
        anything to be called absent."""
        self._max_lag_s, self._max_absence_lag_s = max_lag_s, max_absence_lag_s
        self._stored = StoredGroups(capacity_bytes // _FILTER_SHARE)
        self._grids: dict[bytes, ShardGrid] = {}
        self._store = GroupStore(capacity_bytes)
        self._nodes: dict[bytes, NodeInfo] = {}
        self._lenses: dict[tuple[bytes, int, str], Lens] = {}
        self._highest_version = 0
        self._confirmed_s = float("-inf")  # everything in the log at that time has come
        self._epoch, self._stamp, self._asked_count = 0, 0, 0
        self._touched: dict[bytes, int] = {}  # groups that events touched while questions are on their way
        self._begun = False

    @property
    def used_bytes(self) -> int:
        """What the table takes, by measured weights of its parts."""
        return self._store.used_bytes

    @property
    def group_count(self) -> int:
        """Chain groups that are known in part or whole."""
        return len(self._store.groups)

    def is_current(self, now_s: float) -> bool:
        """Whether what is known may be used."""
        return now_s <= self._confirmed_s + self._max_lag_s

    def open_keyspace(self, keyspace: bytes, grid: ShardGrid) -> bool:
        """Keep what comes of this keyspace; False if that is so already."""
        if keyspace in self._grids:
            return False
        # Its events so far were dropped, versions and all.
        self._store.raise_floors(self._highest_version)
        self._grids[keyspace] = grid
        return True

    def apply(self, event: IndexEvent, now_s: float) -> None:
        """Take the next event of a watch for replicas."""
        match event.event:
            case ChunkBatch(events=chunks):
                for chunk in chunks:
                    self._apply_chunk(chunk)
                self._store.shrink()
            case ChunkEvent() as chunk:
                self._apply_chunk(chunk)
                self._store.shrink()
            case NodeEvent(node=node, alive=alive):
                self._apply_node(node, alive)
            case HeartbeatEvent(age_ms=age_ms):
                if self._begun:
                    self._confirmed_s = now_s - age_ms / 1e3
            case ResyncEvent(nodes=nodes):
                self._reset(nodes)

    def match(self, query: ChainQuery, now_s: float) -> ChainMatch:
        """The longest prefix that is known to be covered; the rest is for the index to say."""
        lens = self._lens(query) if self.is_current(now_s) else None
        if lens is None:
            return NOTHING
        store = self._store
        runs: list[MatchRun] = []
        seen: list[bytes] = []
        matched = count = 0
        places: tuple[Location, ...] = ()
        for key, part in parts(query):
            group = store.groups.get(key)
            if group is None:
                break
            view = group.views.get((lens, part)) or store.look(group, lens, part)
            seen.append(key)
            for length, where in view.runs:
                if where is not places and where != places:
                    if count:
                        runs.append(MatchRun(chunk_count=count, locations=places))
                    count, places = 0, where
                count += length
            matched += view.matched
            if view.matched * HASH_BYTES < len(part):
                break
        if count:
            runs.append(MatchRun(chunk_count=count, locations=places))
        store.use(seen)
        store.shrink()
        named = {place.node_id for run in runs for place in run.locations}
        return ChainMatch(
            matched_chunks=matched, runs=tuple(runs), nodes={node_id: self._nodes[node_id] for node_id in named}
        )

    def is_absent(self, query: ChainQuery, now_s: float) -> bool:
        """Whether no chunk of the group in which a query begins was stored anywhere max_absence_lag_s ago, by any node:
        then the query finds nothing."""
        if now_s > self._confirmed_s + self._max_absence_lag_s:
            return False
        key, _ = next(parts(query))
        return self._stored.is_absent(query.keyspace, key[-HASH_BYTES:])

    def begin_listing(self) -> GroupListing | None:
        """Begin to list the groups of all keyspaces that are open now. None before the first RESYNC."""
        return self._stored.begin(frozenset(self._grids)) if self._begun else None

    def finish_listing(self, listing: GroupListing) -> bool:
        """All groups of its keyspaces were added to its filter. False if events were lost meanwhile: begin again."""
        return self._stored.finish(listing)

    def begin(self) -> Asked:
        """Before a question is sent to the index; `end` must follow, also when it fails."""
        self._asked_count += 1
        return Asked(self._epoch, self._stamp)

    def end(self) -> None:
        """The question has been answered, and learned from, or will not be."""
        self._asked_count -= 1
        if not self._asked_count:
            self._touched.clear()

    def learn(self, asked: Asked, query: ChainQuery, found: ChainMatch) -> None:
        """Take the index's answer, before `end`."""
        coverage = self._coverage(query)
        if asked.epoch != self._epoch or not self._begun or coverage is None:
            return
        places = (run.locations for run in found.runs for _ in range(run.chunk_count))
        keys: list[bytes] = []
        for key, part in parts(query):
            where = list(islice(places, len(part) // HASH_BYTES))
            if not where:
                break
            if self._touched.get(key, 0) <= asked.stamp:
                keys.append(key)
                self._learn_part(key, part, where, coverage)
        self._store.use(keys)
        self._store.shrink()

    def forget(self, query: ChainQuery) -> None:
        """Something that was said about this part of a chain proved wrong: the index is to be asked about it."""
        for key, _ in parts(query):
            self._store.drop(key)
            self._stored.note(key[-HASH_BYTES:])

    def note_stored(self, query: ChainQuery) -> None:
        """Chunks of this part of a chain have just been stored from here: the index is to be asked about it, though no
        event has come yet."""
        for key, _ in parts(query):
            self._stored.note(key[-HASH_BYTES:])

    def _learn_part(self, key: bytes, part: bytes, where: list[tuple[Location, ...]], coverage: Coverage) -> None:
        group = self._store.open(key, asked_for=True)
        for number, locations in enumerate(where):
            field = part[number * HASH_BYTES : number * HASH_BYTES + FIELD_BYTES]
            version, ordered, value = self._store.known(key, field)
            self._store.put(key, group, field, version, ordered, merged(value, locations, coverage))
        self._store.close(key, group)

    def _apply_chunk(self, event: ChunkEvent) -> None:
        key, field = event.keyspace + event.group_head_hash, event.chunk_hash[:FIELD_BYTES]
        self._highest_version = max(self._highest_version, event.version)
        if event.keyspace not in self._grids:
            return
        self._touch(key)
        self._stored.note(event.group_head_hash)  # also without a live node: it may come back without an event
        floor, ordered, value = self._store.known(key, field)
        if ordered and event.version < floor:
            return
        # At or below a floor it may be older than what was forgotten or learned, or newer: then nothing is known.
        locations = event.locations if ordered or event.version > floor else ()
        if value is None and not locations:
            self._store.raise_floor(key, event.version)
            return
        group = self._store.open(key, asked_for=False)
        if locations:
            self._store.put(key, group, field, event.version, True, locations)
        else:
            self._store.remove(key, group, field, event.version)
        self._store.close(key, group)

    def _touch(self, key: bytes) -> None:
        if not self._asked_count:
            return
        self._stamp += 1
        self._touched[key] = self._stamp
        if len(self._touched) > _TOUCHED_MAX:
            self._epoch += 1  # nothing is learned from the questions that are on their way
            self._touched.clear()

    def _apply_node(self, node: NodeInfo, alive: bool) -> None:
        known = self._nodes.get(node.node_id)
        if known is not None and known.incarnation > node.incarnation:
            return
        if alive and known != node:
            self._change_nodes({**self._nodes, node.node_id: node})
        elif not alive and known is not None:
            self._change_nodes({node_id: each for node_id, each in self._nodes.items() if node_id != node.node_id})

    def _change_nodes(self, nodes: dict[bytes, NodeInfo]) -> None:
        self._nodes = nodes
        self._lenses.clear()  # and with them all views

    def _reset(self, nodes: tuple[NodeInfo, ...]) -> None:
        self._begun = True
        self._epoch += 1
        self._store.clear()
        self._store.raise_floors(self._highest_version)
        self._confirmed_s = float("-inf")
        self._stored.clear()
        self._change_nodes({node.node_id: node for node in nodes})

    def _lens(self, query: ChainQuery) -> Lens | None:
        key = (query.keyspace, query.shards, query.host_id)
        lens = self._lenses.get(key)
        if lens is None:
            coverage = self._coverage(query)
            if coverage is None:
                return None
            if len(self._lenses) >= _LENSES_MAX:
                self._lenses.clear()
            lens = self._lenses[key] = Lens(coverage, query.host_id, self._nodes)
        return lens

    def _coverage(self, query: ChainQuery) -> Coverage | None:
        """What a question is about; None for a keyspace that was not opened, and shards that it has not."""
        grid = self._grids.get(query.keyspace)
        if grid is None or query.shards & ~grid.valid_shards:
            return None
        return Coverage.of(grid, query.shards)
