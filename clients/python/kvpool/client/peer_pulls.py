"""Pulls: prefixes that another rank of this host has on its GPU, copied into one's own cache over GPU links.

The schedulers of both engines have agreed on the slots. Those of the source hold final rows and stay pinned, those of
the destination untouched, until the hold of the pull has ended: a deadline, a cancelled caller or a lost connection
ends the wait, not the copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.client.config import ClientConfig
from kvpool.client.gpuagent import EngineSession
from kvpool.client.gpuagent_control import AgentControl
from kvpool.client.retry import Backoff
from kvpool.core.errors import DeadlineExceeded, KvPoolError, SessionUnknown
from kvpool.core.ipc import EngineEvent
from kvpool.v1 import gpuagent_pb2
from kvpool.wire.convert_engine import BlockIds, block_ids_to_bytes, engine_event_to_proto

DEFAULT_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPull:
    """Tokens of one request from one source rank; see the proto's PeerPull.

    source_agent: "unix:/path" of the source rank's agent; empty if both ranks have the same one.
    *_blocks:     that the tokens lie in, in order; more may follow. *_first_token: place in the first of them.
    """

    source_session_id: bytes
    source_blocks: BlockIds
    destination_blocks: BlockIds
    token_count: int
    source_first_token: int = 0
    destination_first_token: int = 0
    source_agent: str = ""


@dataclass(frozen=True, slots=True)
class PulledPart:
    """What of the model one of the pulls copied: what both ranks have."""

    layers: range
    heads: range


@dataclass(frozen=True, slots=True)
class PullReport:
    """A pull that is in. copy_s: on the GPU. parts: of each of the pulls, in order."""

    size_bytes: int
    copy_s: float
    parts: tuple[PulledPart, ...]


class PullHandle:
    """A pull in progress. Belongs to its event loop."""

    def __init__(self, session: EngineSession, control: AgentControl, config: ClientConfig) -> None:
        """Made by PeerPulls.begin."""
        self._session, self._control, self._config = session, control, config
        self._request = gpuagent_pb2.PeerPullRequest()
        self._after: EngineEvent | None = None
        self._outcome: asyncio.Future[PullReport] = asyncio.get_running_loop().create_future()
        self._outcome.add_done_callback(lambda done: done.cancelled() or done.exception())  # a caller may have left
        self._held = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None]

    def start(self, request: gpuagent_pb2.PeerPullRequest, after: EngineEvent | None, timeout_s: float) -> None:
        """Send it; once."""
        self._request, self._after = request, after
        self._task = asyncio.create_task(self._run(timeout_s), name="peer pull")

    @property
    def hold_ended(self) -> bool:
        """Whether source slots may be unpinned and destination slots used (after success) or reused."""
        return self._held.is_set()

    async def wait_hold(self) -> None:
        """Return when the hold has ended. Without a deadline: without the agent's word it lasts until it has let go."""
        await self._held.wait()

    async def done(self, timeout_s: float) -> PullReport:
        """The end of the pull. raises: DeadlineExceeded (it goes on: `cancel` it); what refused or broke it: then the
        destination slots hold anything, and the hold may last longer."""
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._outcome)
        except TimeoutError:
            raise DeadlineExceeded(f"the pull was not done within {timeout_s:g} s") from None

    def cancel(self) -> None:
        """Ask the agent to end it early; a copy that has begun ends first. The hold ends with the agent's answer."""
        if not self._outcome.done() and self._ending is None:
            self._ending = asyncio.create_task(self._settle(), name="peer pull end")

    async def _run(self, timeout_s: float) -> None:
        try:
            answer = await self._control.peer_pull(self._request, timeout_s=timeout_s)
        except BaseException as error:
            known = error if isinstance(error, KvPoolError) else KvPoolError(f"the pull was abandoned ({error!r})")
            self._outcome.set_exception(known)
            # Whether the agent has said so or nobody has: it tells when nothing of the pull runs any more.
            if not isinstance(error, asyncio.CancelledError):
                await self._settle()
            return
        self._outcome.set_result(_report_of(answer))
        self._held.set()

    async def _settle(self) -> None:
        backoff = Backoff(self._config.backoff_initial_s, self._config.backoff_max_s)
        released, pull_id = self._session.released, self._request.pull_id
        while not released.is_set() and not self._held.is_set():
            try:
                await self._control.end_peer_pull(self._request.session_id, pull_id, self._after)
                break
            except SessionUnknown:  # perhaps the word of a new agent while the old one's process still ends
                await released.wait()
            except KvPoolError:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff.next_s()):
                        await released.wait()
        self._held.set()


class PeerPulls:
    """Pulls into the cache of one session. Belongs to its event loop."""

    def __init__(self, session: EngineSession, control: AgentControl, config: ClientConfig) -> None:
        """control: of the session's agent."""
        self._session, self._control, self._config = session, control, config

    def begin(
        self,
        pulls: Sequence[TokenPull],
        *,
        wait_s: float = DEFAULT_WAIT_S,
        after: EngineEvent | None = None,
        partial: bool = False,
    ) -> PullHandle:
        """Begin to pull all of them, in one launch for each source.

        wait_s: give up if the copy has not begun by then. after: own GPU work that may still use what the destination
        slots held before; it stays the caller's to give back. partial: tokens may be left without some layers or heads.
        raises: InvalidRequest for an event that is not taken.
        """
        if after is not None:
            self._session.announce(after)
        request = gpuagent_pb2.PeerPullRequest(
            session_id=self._session.session_id,
            pull_id=_next_id(),
            pulls=[_pull_to_proto(pull) for pull in pulls],
            after=engine_event_to_proto(after) if after is not None else None,
            wait_ms=max(1, round(wait_s * 1e3)),
            partial=partial,
        )
        handle = PullHandle(self._session, self._control, self._config)
        handle.start(request, after, wait_s + self._config.call_timeout_s)
        return handle


_ids = itertools.count(time.time_ns())


def _next_id() -> int:
    """Growing, and never one that another client of the session has used."""
    return next(_ids)


def _pull_to_proto(pull: TokenPull) -> gpuagent_pb2.PeerPull:
    return gpuagent_pb2.PeerPull(
        source_session_id=pull.source_session_id,
        source_agent=pull.source_agent,
        source_block_ids=block_ids_to_bytes(pull.source_blocks),
        source_first_token=pull.source_first_token,
        destination_block_ids=block_ids_to_bytes(pull.destination_blocks),
        destination_first_token=pull.destination_first_token,
        token_count=pull.token_count,
    )


def _report_of(answer: gpuagent_pb2.PeerPullResponse) -> PullReport:
    parts = tuple(
        PulledPart(
            range(part.first_layer, part.first_layer + part.layer_count),
            range(part.first_head, part.first_head + part.head_count),
        )
        for part in answer.pulled
    )
    return PullReport(answer.size_bytes, answer.copy_us / 1e6, parts)
