"""As much of vLLM's modules as the connector imports, for tests without vLLM."""

from __future__ import annotations

import abc
import copy
import enum
import sys
import uuid
from dataclasses import dataclass, field
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
EVENTS = "vllm.distributed.kv_events"


class Role(enum.Enum):
    """KVConnectorRole."""

    SCHEDULER = 0
    WORKER = 1


class SupportsHMA(abc.ABC):
    """The class of that name."""

    @abc.abstractmethod
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, Any]: ...


class Base(abc.ABC):
    """KVConnectorBase_V1."""

    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config, self._role = vllm_config, kv_cache_config, role
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._connector_metadata: Any = None

    @abc.abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    @abc.abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    @abc.abstractmethod
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    @abc.abstractmethod
    def wait_for_save(self) -> None: ...
    @abc.abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]: ...
    @abc.abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...
    @abc.abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    def register_kv_caches(self, kv_caches: Any) -> None:
        return None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        return None, None

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        return {"external_unspecified": num_external_tokens} if num_external_tokens else {}

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._connector_metadata = metadata

    on_new_request = update_connector_output = take_events = reset_cache = requires_kv_delivery = None
    handle_preemptions = get_transfer_results = get_block_ids_with_load_errors = build_connector_worker_meta = None


@dataclass
class SchedulerOutput:
    """One of vLLM's dataclasses."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None
    kv_connector_block_state: Any = None
    scheduled_cached_reqs: Any = None


class Request:
    """One of vLLM's plain classes: attributes are set by its constructor."""

    def __init__(self) -> None:
        self.request_id = self.num_prompt_tokens = self.num_computed_tokens = self.num_in_flight_tokens = None
        self.num_preemptions = self.cache_salt = self.lora_request = self.mm_features = self.prompt_embeds = None
        self.resumable = self.skip_reading_prefix_cache = self.all_token_ids = self.trace_headers = None
        self.kv_transfer_params = None

    num_tokens = 0


@dataclass
class VllmConfig:
    """What the connector's constructor reads."""

    kv_transfer_config: Any
    kv_events_config: Any = None
    speculative_config: Any = None
    device_config: Any = field(default_factory=lambda: SimpleNamespace(device_type="cuda"))
    cache_config: Any = field(default_factory=lambda: SimpleNamespace(block_size=16))
    parallel_config: Any = field(default_factory=lambda: SimpleNamespace(world_size=1, data_parallel_size=1))
    batches: int = 1
    num_prefill_lookahead_tokens: int = 0

    @property
    def max_concurrent_batches(self) -> int:
        return self.batches


def a_config(batches: int = 1, **extra: Any) -> VllmConfig:
    """Of an engine with the connector."""
    extra = {"agent": "unix:/x", "chunk_tokens": 32, **extra}
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra,
        is_kv_consumer=True,
        is_kv_producer=True,
        kv_load_failure_policy="fail",
        engine_id=uuid.uuid4().hex,
    )
    return VllmConfig(transfer, batches=batches)


def _child_of(vllm_config: Any, transfer: Any) -> Any:
    child = copy.copy(vllm_config)
    child.kv_transfer_config = transfer
    return child


def _make(vllm_config: Any, transfer: Any, connector: Any, role: Role) -> Any:
    return connector(_child_of(vllm_config, transfer), role, None)


def _layout(vllm_config: Any, transfer: Any, connector: Any) -> Any:
    return connector.get_required_kvcache_layout(_child_of(vllm_config, transfer))


def multi_connector() -> Any:
    """As much of MultiConnector as a child sees of it: the module that it is called from, and what is known there."""
    module = {**globals(), "__name__": "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"}
    made = (FunctionType(function.__code__, module) for function in (_make, _layout))
    return SimpleNamespace(**dict(zip(("make", "layout"), made, strict=True)))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends."""
    empty: Any = type("Empty", (), {})
    modules: dict[str, dict[str, Any]] = {
        BASE: {
            "KVConnectorBase_V1": Base,
            "KVConnectorRole": Role,
            "SupportsHMA": SupportsHMA,
            "KVConnectorHandshakeMetadata": empty,
            "KVConnectorMetadata": empty,
            "KVConnectorWorkerMetadata": empty,
        },
        METRICS: {"KVConnectorStats": empty, "KVConnectorPromMetrics": empty},
        EVENTS: {"MEDIUM_STORAGE": "STORAGE", "BlockRemoved": dict, "BlockStored": dict, "KVCacheEvent": object},
        "vllm.v1.core.sched.output": {"SchedulerOutput": SchedulerOutput},
        "vllm.v1.request": {"Request": Request},
        "vllm.config": {"VllmConfig": VllmConfig},
    }
    for name, values in modules.items():
        for at in range(name.count(".") + 1):
            package = ".".join(name.split(".")[: at + 1])
            monkeypatch.setitem(sys.modules, package, sys.modules.get(package) or ModuleType(package))
        vars(sys.modules[name]).update(values)
    vars(sys.modules["vllm"])["__version__"] = "9.9"
    for own in ("kvpool.connectors.vllm.connector", "kvpool.connectors.vllm.messages"):
        monkeypatch.setitem(sys.modules, own, ModuleType(own))  # gone after the test
        del sys.modules[own]
