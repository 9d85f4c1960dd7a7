"""GPU caches of the host as sources of loads: what other ranks have announced, looked up and pulled."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.core.cancel import CancelToken
from kvpool.core.chunks import HASH_BYTES, ChunkRange
from kvpool.core.errors import InvalidRequest, KvPoolError, NotServed
from kvpool_gpuagent.core.cached_chunks import HeldChunks, PulledChunks, Share, SourceName, covering
from kvpool_gpuagent.engine.peers import PeerPulls
from kvpool_gpuagent.engine.session import EngineSession
from kvpool_gpuagent.ports import PeerAgents

_log = logging.getLogger(__name__)

_MAX_OUT_OF_REACH = 1024
OUT_OF_REACH_S = 60.0  # what could not be mapped may only have lacked memory
FIND_TIMEOUT_S = 0.02  # of other agents of the host: a match waits for them
# A load follows the match that planned it, mostly within milliseconds, and then asks no agent again: what has changed
# meanwhile the generations after its copy say. After a longer wait more of a prefix may have changed.
REMEMBER_S = 2.0
_MAX_REMEMBERED = 256


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """What other agents have said of chunks. until_s: on the loop's clock; not used any more then."""

    chunk_hashes: bytes
    held: list[HeldChunks]
    until_s: float


class _Answers:
    """The latest answers of other agents, by what was asked. Belongs to one event loop."""

    def __init__(self) -> None:
        # By keyspace, asking engine (other agents leave out its own caches) and chain; the oldest first.
        self._answers: OrderedDict[tuple[bytes, bytes, bytes], _Answer] = OrderedDict()

    def put(self, session: EngineSession, answer: _Answer, now_s: float) -> None:
        """Remember it; forget what has expired, which may have many megabytes."""
        while self._answers and next(iter(self._answers.values())).until_s <= now_s:
            self._answers.popitem(last=False)
        key = session.rank.keyspace, session.engine_id, answer.chunk_hashes
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > _MAX_REMEMBERED:
            self._answers.popitem(last=False)

    def get(self, session: EngineSession, chunk_hashes: bytes, now_s: float) -> list[HeldChunks] | None:
        """Return what was last said of these chunks, or of more that follow them; None if that is not known."""
        for answer in reversed(self._of(session, chunk_hashes).values()):
            if now_s < answer.until_s:
                return [one.leading(len(chunk_hashes) // HASH_BYTES) for one in answer.held]
        return None

    def forget(self, session: EngineSession, chunk_hashes: bytes) -> None:
        """An answer about these chunks was wrong, or has become so; so may be others about chains that begin alike."""
        for key in self._of(session, chunk_hashes[:HASH_BYTES]):
            del self._answers[key]

    def _of(self, session: EngineSession, beginning: bytes) -> dict[tuple[bytes, bytes, bytes], _Answer]:
        """Answers about chains that begin so."""
        asking = session.rank.keyspace, session.engine_id
        return {
            key: answer for key, answer in self._answers.items() if key[:2] == asking and key[2].startswith(beginning)
        }


class HostCaches:
    """Belongs to one event loop."""

    def __init__(
        self, sessions: Callable[[], Sequence[EngineSession]], agents: PeerAgents | None, pulls: PeerPulls
    ) -> None:
        """sessions: of this agent. agents: of this host; None where no other is ever asked."""
        self._sessions, self._agents, self._pulls = sessions, agents, pulls
        # By session: sources to which no link leads from its GPU, or whose memory cannot be mapped; and until when they
        # are left out, on the loop's clock.
        self._out_of_reach: dict[tuple[bytes, SourceName], float] = {}
        self._answers = _Answers()
        self._mapping: dict[SourceName, asyncio.Future[None]] = {}

    def held(self, keyspace: bytes, chunk_hashes: bytes, engine_id: bytes) -> list[HeldChunks]:
        """Return what caches of this agent's sessions hold, but for those of this engine."""
        hashes = [chunk_hashes[start : start + HASH_BYTES] for start in range(0, len(chunk_hashes), HASH_BYTES)]
        held: list[HeldChunks] = []
        for session in self._sessions():
            if session.cached is None or not session.is_open or session.rank.keyspace != keyspace:
                continue
            if session.engine_id == engine_id:
                continue
            found, layout = session.cached.find(hashes), session.rank.layout
            if found.positions.size:
                one = HeldChunks(
                    source=SourceName(session.session_id, ""),
                    layers=layout.layer_range,
                    heads=layout.head_range,
                    scales=bool(layout.layers[0].scales),
                    found=found,
                )
                held.append(one)
        return held

    async def find(self, session: EngineSession, chunk_hashes: bytes) -> npt.NDArray[np.bool_]:
        """Return which chunks a session could pull whole. Never raises."""
        complete, _ = self._covering(session, chunk_hashes, await self._ask(session, chunk_hashes))
        return complete

    async def pull(
        self, session: EngineSession, span: ChunkRange, stop: CancelToken, ends_at_s: float
    ) -> PulledChunks | None:
        """Copy into a load's blocks what other ranks have of its chunks; None if that is nothing, or nothing came of
        it. ends_at_s: of the load, on the loop's clock. Never raises; once it has returned nothing of it touches
        the blocks."""
        hashes = span.chunk_hashes
        held = self._answers.get(session, hashes, asyncio.get_running_loop().time())
        complete, shares = self._covering(session, hashes, held or [])
        if not complete.all():  # others may have announced the rest since
            _, shares = self._covering(session, hashes, await self._ask(session, hashes))
        if not shares:
            return None
        pulled = await self._pull(session, span, shares, stop, ends_at_s)
        if pulled is None or not pulled.loaded.all():
            self._answers.forget(session, hashes)
        return pulled

    async def _pull(
        self, session: EngineSession, span: ChunkRange, shares: Sequence[Share], stop: CancelToken, ends_at_s: float
    ) -> PulledChunks | None:
        try:
            return await self._pulls.pull(session, span, shares, stop, ends_at_s)
        except (NotServed, InvalidRequest) as error:  # also a GPU that this agent does not see, a handle it cannot open
            sources = {share.held.source for share in shares}
            if len(sources) > 1:  # a pull from each alone shows which it was; the chunks come from elsewhere this time
                for source in sources:
                    alone = [share for share in shares if share.held.source == source]
                    await self._pull(session, span, alone, stop, ends_at_s)
                return None
            self._leave_out(session, sources, error)
        except KvPoolError as error:
            _log.info("chunks of other ranks' caches are loaded from elsewhere: %s", error)
        except Exception:
            _log.exception("a pull from other ranks' caches failed")
        return None

    async def _ask(self, session: EngineSession, chunk_hashes: bytes) -> list[HeldChunks]:
        """What caches of other agents' sessions hold that are mapped here. Never raises.

        Others are mapped in the background: no match waits for that, which takes seconds the first time.
        """
        if self._agents is None:
            return []
        held = await self._agents.find(session.rank.keyspace, chunk_hashes, session.engine_id, FIND_TIMEOUT_S)
        unmapped = {
            one.source
            for one in held
            if not self._pulls.is_mapped(session, one.source) and self._is_in_reach(session, one.source)
        }
        if unmapped:
            await asyncio.wait([self._map(session, source) for source in unmapped], timeout=FIND_TIMEOUT_S)
            held = [one for one in held if self._pulls.is_mapped(session, one.source)]
        now_s = asyncio.get_running_loop().time()
        self._answers.put(session, _Answer(chunk_hashes, held, now_s + REMEMBER_S), now_s)
        return held

    def _map(self, session: EngineSession, source: SourceName) -> asyncio.Future[None]:
        mapping = self._mapping.get(source)
        if mapping is None:
            mapping = self._mapping[source] = asyncio.ensure_future(self._map_one(session, source))
            mapping.add_done_callback(lambda _: self._mapping.pop(source))
        return mapping

    async def _map_one(self, session: EngineSession, source: SourceName) -> None:
        try:
            await self._pulls.map(session, source)
        except (NotServed, InvalidRequest) as error:
            self._leave_out(session, {source}, error)
        except KvPoolError as error:
            _log.info("a cache of another rank is not mapped yet: %s", error)
        except Exception:
            _log.exception("a cache of another rank could not be mapped")

    def _leave_out(self, session: EngineSession, sources: set[SourceName], error: KvPoolError) -> None:
        if len(self._out_of_reach) > _MAX_OUT_OF_REACH:
            self._out_of_reach.clear()
        until_s = asyncio.get_running_loop().time() + OUT_OF_REACH_S
        self._out_of_reach |= {(session.session_id, source): until_s for source in sources}
        _log.warning(
            "a cache of another rank is out of reach, it is not asked again for %d s: %s", OUT_OF_REACH_S, error
        )

    def _is_in_reach(self, session: EngineSession, source: SourceName) -> bool:
        until_s = self._out_of_reach.get((session.session_id, source), 0.0)
        return until_s <= asyncio.get_running_loop().time()

    def _covering(
        self, session: EngineSession, chunk_hashes: bytes, elsewhere: Sequence[HeldChunks]
    ) -> tuple[npt.NDArray[np.bool_], list[Share]]:
        """elsewhere: what caches of other agents' sessions hold."""
        rank, layout = session.rank, session.rank.layout
        held = [*self.held(rank.keyspace, chunk_hashes, session.engine_id), *elsewhere]
        held = [one for one in held if self._is_in_reach(session, one.source)]
        scales, chunk_count = bool(layout.layers[0].scales), len(chunk_hashes) // HASH_BYTES
        return covering(held, layout.layer_range, layout.head_range, scales=scales, chunk_count=chunk_count)
