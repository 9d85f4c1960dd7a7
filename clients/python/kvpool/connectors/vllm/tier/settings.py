"""What the tier's entry in `secondary_tiers` may hold beside `type` and `module_path`, and whose KV that makes it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from kvpool.client.object_store import object_space
from kvpool.client.store_config import StoreConfig, check_names, values_of
from kvpool.client.store_values import KeyspaceShards
from kvpool.core.errors import InvalidRequest
from kvpool.core.geometry import check_name

_ENGINE = "vllm-tier"
_LOCALITIES = ("", "LOCAL", "REMOTE")


def usual_copy_threads() -> int:
    """Three quarters of this process's processors, from 4 to 16: a request waits for what they copy, and 12 threads
    copied 55 GB/s where 8 copied 47 (16 virtual processors)."""
    return min(16, max(4, len(os.sched_getaffinity(0)) * 3 // 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Of one tier. Servers share where all of the first group are equal. store: addresses, deadlines and limits."""

    store: StoreConfig
    model_revision: str  # which weights the model's name stands for: a commit, a digest, a date of your own
    model_id: str = ""  # empty: the model as vLLM was given it, a name or a path
    salt: str = ""  # whatever else must agree: attention backend, a tenant
    weight_version: str = ""  # set it only if the weights never change while the engine runs

    lookup_timeout_s: float = 0.5  # a chunk that has not been found by then is a miss
    store_bytes_in_flight_max: int = 0  # stores beyond it are refused; 0: a quarter of vLLM's CPU region
    known_s: float = 60.0  # a chunk seen in the cluster is neither looked up nor offered again for so long
    enable_kv_events: bool = False  # where vLLM publishes KV events
    locality: str = ""  # "LOCAL" or "REMOTE": what vLLM's filters and events call this tier

    def __post_init__(self) -> None:
        if not self.model_revision:
            raise InvalidRequest(
                "the kvpool tier needs model_revision, as in "
                '{"type": "KvPoolTier", "model_revision": "a commit or digest of the weights"}: vLLM does not say '
                "which weights a model's name stands for, and KV of other weights must not be taken for KV of these"
            )
        check_name("model_id", self.model_id, may_be_empty=True)
        check_name("model_revision", self.model_revision)
        for name in ("lookup_timeout_s", "known_s"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(f"{name} must be > 0, got {getattr(self, name)}")
        if self.store_bytes_in_flight_max < 0:
            raise InvalidRequest(f"store_bytes_in_flight_max must be >= 0, got {self.store_bytes_in_flight_max}")
        if self.locality not in _LOCALITIES:
            raise InvalidRequest(f"locality must be LOCAL or REMOTE, got {self.locality!r}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Of the tier's JSON. raises: InvalidRequest naming a setting that is missing, unknown or wrong."""
        own = {one.name for one in fields(cls)} - {"store"}
        check_names(given, own | StoreConfig.names(), "the kvpool tier has no {}; it has {}")
        values = {"model_revision": "", **values_of(cls, given)}
        # Servers of a host trust each other as their agents would: a chunk is verified when it comes into the memory
        # of their pagestore, and not again each time that it is read there.
        defaults = {"trusts_arena": True, "copy_threads": usual_copy_threads()}
        return cls(store=StoreConfig.of({**defaults, **given}), **values)

    def space(self, facts: Mapping[str, Any], size_bytes: int, epoch: str) -> KeyspaceShards:
        """The keyspace of chunks of size_bytes.

        facts: what vLLM knows of their bytes and keys. epoch: empty at first; after a reset one of its own, so that
        nothing from before it is found.
        """
        parts = {
            "facts": facts,
            "salt": self.salt,
            "weights": self.weight_version,
            "epoch": epoch,
        }
        return object_space(
            _ENGINE,
            self.model_id or str(facts["model_name"]),
            self.model_revision,
            size_bytes,
            kind="offload chunk",
            salt=[json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)],  # overrides may be objects
        )
