"""A simulated machine: shared memory that outlives its owner, and the kernel's word on which processes still map it.

Also the referee: it knows which bytes of which slots a client is touching, and what they must be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.core.cluster import SESSION_FILE_NUMBER
from kvpool.core.errors import DeadlineExceeded, KvPoolError, LeaseLost, ServiceUnavailable
from tests.sim.loop import Process, SimLoop, Violation, current_process
from tests.sim.network import Network


@dataclass(slots=True, eq=False)
class Segment:
    """Memory that is there while its owner lives or a client maps it. mappers: the mappings, with their processes."""

    segment_id: int
    memory: bytearray
    owner: Process
    mappers: dict[object, Process] = field(default_factory=dict)
    tenants: set[str] = field(default_factory=set)  # whose clients have mapped it


@dataclass(slots=True, eq=False)
class Hold:
    """A slot that a client is touching."""

    process: Process
    segment_id: int
    offset: int
    end: int
    writes: bool

    def overlaps(self, other: Hold) -> bool:
        return self.segment_id == other.segment_id and self.offset < other.end and other.offset < self.end


@dataclass(slots=True, eq=False)
class SimHost:
    """What of one pagestore's machine survives the pagestore."""

    name: str
    budget_bytes: int
    segments: dict[int, Segment] = field(default_factory=dict)
    session_files: dict[bytes, set[Process]] = field(default_factory=dict)  # who holds them open
    granted: dict[bytes, dict[int, int]] = field(default_factory=dict)  # sizes of segments that a session's client got
    files_by_fd: dict[int, bytes] = field(default_factory=dict)
    holds: list[Hold] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    last_fd: int = 1 << 30

    def fail(self, what: str) -> None:
        self.violations.append(f"{self.name}: {what}")
        raise Violation(self.violations[-1])

    def hold(self, process: Process, segment_id: int, offset: int, size_bytes: int, *, writes: bool) -> Hold:
        """A client begins to touch a slot. No one else may be touching it, readers beside readers excepted."""
        made = Hold(process, segment_id, offset, offset + size_bytes, writes)
        for other in self.holds:
            if other.overlaps(made) and (writes or other.writes) and other.process.alive:
                self.fail(f"slot {segment_id}+{offset} went to {process} while {other.process} was still touching it")
        self.holds.append(made)
        return made

    def let_go(self, hold: Hold) -> None:
        if hold in self.holds:
            self.holds.remove(hold)

    def process_gone(self, process: Process) -> None:
        """The kernel closes what the process had open."""
        self.holds = [one for one in self.holds if one.process is not process]
        for segment in self.segments.values():
            segment.mappers = {one: owner for one, owner in segment.mappers.items() if owner is not process}
        for holders in self.session_files.values():
            holders.discard(process)

    def check_free(self, segment_id: int, offset: int, size_bytes: int) -> None:
        """A slot became free: no live client may be touching it."""
        freed = Hold(Process("owner"), segment_id, offset, offset + size_bytes, True)
        for other in self.holds:
            if other.overlaps(freed) and other.process.alive:
                self.fail(f"slot {segment_id}+{offset} was freed while {other.process} was touching it")

    @property
    def segment_bytes(self) -> int:
        return sum(len(one.memory) for one in self.segments.values() if one.owner.alive or one.mappers)


class SimArena:
    """A pagestore's ports.Arena on a SimHost."""

    def __init__(self, host: SimHost, process: Process) -> None:
        self._host = host
        self._process = process
        self._views: dict[int, memoryview] = {}

    def old_sessions(self) -> dict[bytes, dict[int, int]]:
        return {one: dict(self._host.granted.get(one, {})) for one in self._host.session_files}

    def create_segment(self, segment_id: int, size_bytes: int) -> None:
        host = self._host
        if not self._process.alive:
            return
        if host.segment_bytes + size_bytes > host.budget_bytes:
            host.fail(f"{host.segment_bytes + size_bytes} bytes of segments, the budget is {host.budget_bytes}")
        segment = host.segments[segment_id] = Segment(segment_id, bytearray(b"\xee") * size_bytes, self._process)
        self._views[segment_id] = memoryview(segment.memory)

    def prepare_segment(self, segment_id: int, size_bytes: int, is_wanted: Callable[[], bool]) -> bool:
        self.create_segment(segment_id, size_bytes)
        return True

    def view(self, segment_id: int, offset: int, size_bytes: int) -> memoryview:
        return self._views[segment_id][offset : offset + size_bytes]

    def descriptor(self, segment_id: int, session_id: bytes) -> int:
        size_bytes = len(self._views[segment_id])
        self._host.granted.setdefault(session_id, {})[segment_id] = size_bytes
        return 3

    def destroy_segment(self, segment_id: int) -> None:
        if not self._process.alive:
            return
        segment = self._host.segments.pop(segment_id)
        if segment.mappers:
            self._host.fail(f"segment {segment_id} was destroyed while {list(segment.mappers.values())} map it")
        del self._views[segment_id]

    def create_session_file(self, session_id: bytes) -> int:
        host = self._host
        host.session_files[session_id] = {self._process}
        host.last_fd += 1
        host.files_by_fd[host.last_fd] = session_id
        return host.last_fd

    def close_fd(self, fd: int) -> None:
        """The owner closes its copy of a session file."""
        session_id = self._host.files_by_fd.pop(fd)
        self._host.session_files.get(session_id, set()).discard(self._process)

    def gone_sessions(self, session_ids: Sequence[bytes]) -> Sequence[bytes]:
        return [one for one in session_ids if not self._host.session_files.get(one)]

    def forget_sessions(self, session_ids: Sequence[bytes]) -> None:
        for session_id in session_ids:
            self._host.granted.pop(session_id, None)
            self._host.session_files.pop(session_id, None)

    def close(self, *, remove: bool) -> None:
        if remove:
            for segment_id in list(self._views):
                self.destroy_segment(segment_id)
            self._host.granted.clear()
            self._host.session_files.clear()
        self._views.clear()


Fetch = Callable[[bytes, int], Any]
"""The descriptor server of a pagestore: engine.sessions.descriptor."""


class SimSegmentMap:
    """Takes the place of kvpool.client.segments.SegmentMap: maps segments of a SimHost into a simulated client."""

    network: Network
    tenants: Mapping[str, str]  # of clients by name; as World has them
    servers: dict[str, tuple[Process, SimHost, SimArena, Fetch]]  # by descriptor socket; replaced at each start

    def __init__(
        self, socket_path: str, token: bytes, *, timeout_s: float, fetch: Any = None, on_map: Any = None
    ) -> None:
        self._socket_path = socket_path
        self._token = token
        self._timeout_s = timeout_s
        self._process = current_process()
        self._closed = False
        self._mapped: dict[int, Segment] = {}
        self._session_id: bytes | None = None
        self._host: SimHost | None = None

    async def open(self) -> None:
        await self._fetch(SESSION_FILE_NUMBER)

    def is_mapped(self, segment_id: int) -> bool:
        return segment_id in self._mapped

    async def map(self, segment_ids: Iterable[int]) -> None:
        for segment_id in dict.fromkeys(segment_ids):
            if segment_id not in self._mapped:
                await self._fetch(segment_id)

    def view(self, segment_id: int, offset: int, size_bytes: int) -> memoryview:
        segment = self._mapped.get(segment_id)
        if segment is None:
            raise LeaseLost(f"segment {segment_id} is not mapped")
        return memoryview(segment.memory)[offset : offset + size_bytes]

    async def stop(self) -> None:
        """Nothing is ever being mapped: that takes no time here."""

    def close(self) -> bool:
        self._closed = True
        for segment in self._mapped.values():
            segment.mappers.pop(self, None)
        self._mapped.clear()
        if self._host is not None and self._session_id is not None:
            self._host.session_files.get(self._session_id, set()).discard(self._process)
        self._session_id = None
        return True

    @property
    def host(self) -> SimHost:
        assert self._host is not None
        return self._host

    async def _fetch(self, number: int) -> None:
        """Ask over the raw socket: there and back, and the server may die or restart in between."""
        network = type(self).network
        loop: SimLoop = network.loop
        known = type(self).servers.get(self._socket_path)
        if known is None or not known[0].alive:
            raise ServiceUnavailable(f"no server listens at {self._socket_path}")
        process, host, arena, fetch = known
        done = loop.create_future()
        client = self._process

        def died() -> None:
            loop.call_later(network.delay_s(), finish, ServiceUnavailable("gone"), context=client.context.copy())

        def finish(error: KvPoolError | None) -> None:
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(None)

        def serve() -> None:
            error: KvPoolError | None = None
            try:
                found = fetch(self._token, number)
                if client.alive:
                    self._received(host, number, found.fd)
                if found.give_up:
                    arena.close_fd(found.fd)
            except KvPoolError as refused:
                error = refused
            loop.call_later(network.delay_s(), finish, error, context=client.context.copy())

        process.on_kill.append(died)
        loop.call_later(network.delay_s(), serve, context=process.context.copy())
        try:
            async with asyncio.timeout(self._timeout_s):
                await done
        except TimeoutError:
            raise DeadlineExceeded(f"{self._socket_path} did not answer") from None
        finally:
            if died in process.on_kill:
                process.on_kill.remove(died)

    def _received(self, host: SimHost, number: int, fd: int) -> None:
        """The descriptor is the client's from the moment in which the kernel takes it from the server."""
        if self._closed:
            return  # it is closed as soon as it is there
        self._host = host
        if number == SESSION_FILE_NUMBER:
            self._session_id = host.files_by_fd[fd]
            host.session_files[self._session_id].add(self._process)
        else:
            segment = host.segments[number]
            segment.mappers[self] = self._process
            segment.tenants.add(type(self).tenants.get(self._process.name.partition("#")[0], ""))
            if len(segment.tenants) > 1:
                host.fail(f"segment {number} is mapped by clients of several tenants")
            self._mapped[number] = segment
