"""How an engine's process reaches the cluster without an agent: the index, and the pagestore of its own host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvpool.client.config import ClientConfig
from kvpool.client.tls import tls_from_environment
from kvpool.core.addresses import check_endpoint
from kvpool.core.errors import InvalidRequest

REMOTE = "remote"
_TYPES: Mapping[str, tuple[type, ...]] = {"str": (str,), "float": (int, float), "int": (int,), "bool": (bool,)}


def check_names(given: Iterable[str], known: Iterable[str], text: str) -> None:
    """raises: InvalidRequest if a setting is given that is not known. text: with places for both lists of names."""
    unknown = set(given) - set(known)
    if unknown:
        raise InvalidRequest(text.format(", ".join(sorted(unknown)), ", ".join(sorted(known))))


def values_of(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a dataclass has fields for. raises: InvalidRequest naming one of another type."""
    values = {one.name: given[one.name] for one in fields(cls) if one.name in given}
    for one in fields(cls):
        wanted = _TYPES.get(str(one.type))
        if wanted is None or one.name not in values:
            continue
        if not isinstance(values[one.name], wanted) or isinstance(values[one.name], bool) != (one.type == "bool"):
            raise InvalidRequest(f"{one.name} must be of type {one.type}, got {values[one.name]!r}")
    return values


def usual_copy_threads() -> int:
    """Half of this process's processors, from 4 to 8."""
    return min(8, max(4, len(os.sched_getaffinity(0)) // 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings that all connectors of this kind have. Times bound what a sick cluster can cost an engine."""

    index_endpoints: tuple[str, ...]  # "host:port" of each replica
    pagestore: str  # "unix:/path" of this host's pagestore; "remote": it has none, and pages are streamed
    bearer_token: str = field(default="", repr=False)
    host_id: str = ""  # of this machine, as its pagestore has it: its pages are listed first
    match_timeout_s: float = 0.5  # of one look-up
    load_timeout_s: float = 5.0  # of one call that reads
    store_timeout_s: float = 5.0  # of one call that writes; SGLang waits 10 s for its threads to end
    room_wait_s: float = 1.0  # a call that writes waits so long for the next page that staging has room for
    connect_timeout_s: float = 1.0
    retry_interval_s: float = 0.5  # what could not be reached is left alone for so long
    pages_in_flight: int = 64  # arena slots that one call holds at most; fewer large ones, see arena_call_bytes
    calls_in_flight: int = 2  # of each kind; further ones wait
    copy_threads: int = field(default_factory=usual_copy_threads)  # each copies pages, or runs one stream
    trusts_arena: bool = False  # of this host's pagestore: what is there was verified when it came, and is not again
    stream_bytes_in_flight_max: int = 256 << 20  # buffered by all calls; used only with a remote pagestore
    remembered_chunks: int = 65536  # where they were seen

    def __post_init__(self) -> None:
        if not self.index_endpoints or not self.pagestore:
            raise InvalidRequest(
                "index_endpoints and pagestore must be set, as in "
                '{"index_endpoints": ["127.0.0.1:7100"], "pagestore": "unix:/run/kvpool/pagestore.sock"}'
                '; on a host without a pagestore it is "remote"'
            )
        for number, endpoint in enumerate(self.index_endpoints):
            check_endpoint(endpoint, f"index_endpoints[{number}]")
        if not self.is_remote:
            check_endpoint(self.pagestore, "pagestore")
        for name in (
            "match_timeout_s",
            "load_timeout_s",
            "store_timeout_s",
            "room_wait_s",
            "connect_timeout_s",
            "retry_interval_s",
        ):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name} must be > 0, got {getattr(self, name)}")
        for name in (
            "pages_in_flight",
            "calls_in_flight",
            "copy_threads",
            "remembered_chunks",
            "stream_bytes_in_flight_max",
        ):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def store_threads(self) -> int:
        """Threads that copy what is stored in this host's arena: a quarter where they copy and do nothing else. No
        request waits for it, and each takes the interpreter from the engine's steps."""
        return min(self.copy_threads, max(2, self.copy_threads // 4)) if self.trusts_arena else self.copy_threads

    @property
    def is_remote(self) -> bool:
        """Whether this host has no pagestore."""
        return self.pagestore == REMOTE

    @classmethod
    def names(cls) -> frozenset[str]:
        """Settings that `of` takes."""
        return frozenset(one.name for one in fields(cls))

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> StoreConfig:
        """From an engine's JSON; what is no setting of this class is left alone. raises: InvalidRequest naming one."""
        given = values_of(cls, settings)
        endpoints = given.get("index_endpoints", ())
        if isinstance(endpoints, str):
            endpoints = endpoints.split(",")
        if not isinstance(endpoints, list | tuple) or not all(isinstance(one, str) for one in endpoints):
            raise InvalidRequest(f"index_endpoints must be a list of host:port, got {endpoints!r}")
        given["index_endpoints"] = tuple(one.strip() for one in endpoints if one.strip())
        return cls(**{"pagestore": "", **given})

    @property
    def client(self) -> ClientConfig:
        """For the clients below."""
        return ClientConfig(
            index_endpoints=self.index_endpoints,
            bearer_token=self.bearer_token,
            tls=tls_from_environment(os.environ),
            host_id=self.host_id,
            call_timeout_s=self.connect_timeout_s,
            match_timeout_s=self.match_timeout_s,
            connect_timeout_s=self.connect_timeout_s,
        )
