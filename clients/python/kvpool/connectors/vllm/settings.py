"""Settings in `kv_connector_extra_config`. Defaults are defined here only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvpool.client.config import ClientConfig
from kvpool.client.store_config import check_names, values_of
from kvpool.client.tls import tls_from_environment
from kvpool.connectors.vllm.agent_selector import check_agent
from kvpool.core.errors import InvalidRequest
from kvpool.core.model import ENGINE_CHUNK_TOKENS

STORE_PREFILL, STORE_FINISH, STORE_NEVER = "prefill", "finish", "never"
LOAD_QUICKER, LOAD_ALWAYS, LOAD_NEVER = "quicker", "always", "never"
LAYOUT_NONE, LAYOUT_BLOCK_MAJOR = "none", "BLHNC"
_LAYOUT_CHOICES = (LAYOUT_NONE, LAYOUT_BLOCK_MAJOR, "BHLNC", "LBHNC", "LBNHC")
_LOAD_CHOICES = (LOAD_QUICKER, LOAD_ALWAYS, LOAD_NEVER)
_STORE_CHOICES = (STORE_PREFILL, STORE_FINISH, STORE_NEVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of one engine; all its ranks have the same."""

    # "unix:/path" or "host:port"; "{rank}" in it stands for the number of the worker on its host, "{dp}" for its data
    # parallel index, "{gpu}" for its GPU's UUID. "auto", "auto:/directory" or a directory: the agent that announces
    # itself there for the worker's GPU.
    agent: str = ""
    model_id: str = ""  # empty: the kind of model, as its config says; with a model_revision the model's name or path
    model_revision: str = ""  # empty: a digest of the weights, else the hub's commit; see client.checkpoint
    keyspace_name: str = ""  # what operators see; empty: made of model, revision, element type and chunk_tokens
    salt: str = ""  # engines with unequal salts share nothing
    chunk_tokens: int = ENGINE_CHUNK_TOKENS  # a power of two and a multiple of the engine's block size
    load: str = LOAD_QUICKER  # "quicker": what is likely to be loaded before it would be computed; "always"; "never"
    store: str = STORE_PREFILL  # "prefill": each chunk when it is computed; "finish": when its request ends; "never"
    store_generated: bool = True  # also chunks with generated tokens, when their request ends
    layerwise: bool = False  # a GPU's forward pass waits layer by layer for its loads, instead of the request for all
    min_load_tokens: int = 128  # fewer are always computed
    start_wait_s: float = 10.0  # an engine that starts waits so long for its agent, and then goes on without it
    # A step waits so long for matches, five times as long while nothing is computed; then a request waits without it.
    lookup_wait_ms: float = 3.0
    match_timeout_s: float = 0.3  # a match that takes longer is none
    load_timeout_s: float = 10.0  # of one load, as long as nothing is known of how fast the engine computes
    load_timeout_min_s: float = 1.0  # later ones may take several times what is expected, but so long at least
    load_bytes_in_flight_max: int = 8 << 30  # requests beyond it wait, or are computed if that is quicker
    lease_bytes_max: int = 8 << 30  # that waiting requests have the agent keep in memory, or bring there; 0: none
    store_bytes_in_flight_max: int = 4 << 30  # what is beyond it waits
    store_hold_max_s: float = 20.0  # blocks of a finished request are not kept from the engine for longer
    share_gpu_cache: bool = True  # other engines of the host may copy what the GPU's cache holds
    kv_cache_layout: str = ""  # that vLLM is asked for: empty asks for BLHNC on GPUs, where nothing speaks against it
    bearer_token: str = ""

    def __post_init__(self) -> None:
        check_agent(self.agent)
        if self.load not in _LOAD_CHOICES:
            raise InvalidRequest(f"load must be one of {', '.join(_LOAD_CHOICES)}, got {self.load!r}")
        if self.store not in _STORE_CHOICES:
            raise InvalidRequest(f"store must be one of {', '.join(_STORE_CHOICES)}, got {self.store!r}")
        if self.kv_cache_layout not in ("", *_LAYOUT_CHOICES):
            choices = ", ".join(_LAYOUT_CHOICES)
            raise InvalidRequest(f"kv_cache_layout must be empty or one of {choices}, got {self.kv_cache_layout!r}")
        if self.chunk_tokens < 16 or self.chunk_tokens & (self.chunk_tokens - 1):
            raise InvalidRequest(f"chunk_tokens must be a power of two of at least 16, got {self.chunk_tokens}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and value < 0:
                raise InvalidRequest(f"{field.name} must be >= 0, got {value}")

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> VllmSettings:
        """Parse a config dict. raises: InvalidRequest naming a key that is unknown or has the wrong type."""
        check_names(extra, [one.name for one in fields(cls)], "kv_connector_extra_config has no {}; it has {}")
        return cls(**values_of(cls, extra))

    def limited(self, *, loads: bool, stores: bool) -> VllmSettings:
        """Return the settings of an engine whose role (`kv_role`) excludes loads or stores."""
        load, store = self.load if loads else LOAD_NEVER, self.store if stores else STORE_NEVER
        return replace(self, load=load, store=store, share_gpu_cache=self.share_gpu_cache and stores)

    def client_config(self, *, on_gpu: bool) -> ClientConfig:
        """Return the client configuration, without the endpoint, which AgentSelector finds."""
        return ClientConfig(
            bearer_token=self.bearer_token,
            tls=tls_from_environment(os.environ),
            match_timeout_s=max(self.match_timeout_s, 0.001),
            load_timeout_s=max(self.load_timeout_s, 0.001),
            # An agent with a GPU pins its pagestore's whole arena for the first engine: a second for a few GiB.
            connect_timeout_s=60.0 if on_gpu else 5.0,
        )
