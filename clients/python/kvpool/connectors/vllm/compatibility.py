"""Checks whether the connector supports the installed vLLM and the engine's configuration.

vLLM's interface changes between releases. Whatever is not supported switches the connector off: nothing here raises.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

SUPPORTED = "0.31 to 0.33"
_STEP = ("num_scheduled_tokens", "preempted_req_ids", "kv_connector_block_state", "scheduled_cached_reqs")
_REQUEST = (
    *("request_id", "all_token_ids", "num_prompt_tokens", "num_tokens", "num_computed_tokens", "num_in_flight_tokens"),
    *("num_preemptions", "cache_salt", "lora_request", "mm_features", "prompt_embeds", "resumable"),
    *("skip_reading_prefix_cache", "trace_headers", "kv_transfer_params"),
)
_CONNECTOR = (
    *("on_new_request", "update_connector_output", "take_events", "reset_cache", "requires_kv_delivery"),
    *("handle_preemptions", "get_transfer_results", "get_block_ids_with_load_errors", "build_connector_worker_meta"),
)
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_CONFIG = ("kv_transfer_config", "kv_events_config", "max_concurrent_batches", "num_prefill_lookahead_tokens")


def incompatible_vllm(cause: str) -> str:
    """Return the message for users of a vLLM version that the connector is not compatible with."""
    import vllm

    return (
        f"kvpool.connectors.vllm does not fit vLLM {getattr(vllm, '__version__', '?')}: {cause}. "
        f"It supports {SUPPORTED}: install that, or a kvpool made for your vLLM"
    )


def incompatibility(connector: type) -> str:
    """Return why the connector does not fit the installed vLLM; empty if it does. raises: ImportError for moved
    modules."""
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    lacking = missing_attributes(VllmConfig, SchedulerOutput, Request, KVConnectorBase_V1)
    if lacking:
        return incompatible_vllm(f"there is no {', '.join(lacking)}")
    unknown = sorted(getattr(connector, "__abstractmethods__", ()))
    return incompatible_vllm(f"it asks for {', '.join(unknown)}") if unknown else ""


def defers_freeing_blocks() -> bool:
    """Whether this vLLM's scheduler can keep freed blocks until no running step writes to them: all releases from
    0.30 to 0.33 do so for connectors that load, where steps overlap. Without it a load has to wait for the GPU."""
    try:
        from vllm.v1.core.sched.scheduler import Scheduler
    except ImportError:
        return False
    return _has(Scheduler, "defer_block_free")


def disabled_reason(vllm_config: Any, environment: Mapping[str, str] = os.environ) -> str:
    """Return why this engine runs without kvpool and which setting to change; empty if it is supported.

    The result is the same in all processes of an engine. Restrictions of the KV cache are checked where it is read.
    """
    model = getattr(vllm_config, "model_config", None)
    if getattr(model, "enable_sleep_mode", False):
        return (
            "sleep mode takes the memory of the KV cache away and maps other memory in its place, which an agent "
            "cannot follow; start without --enable-sleep-mode"
        )
    if getattr(model, "enable_cumem_allocator", False):
        return "memory of vLLM's cumem allocator cannot be exported by CUDA IPC; start without --enable-cumem-allocator"
    if str(getattr(getattr(vllm_config, "device_config", None), "device_type", "")) != "cuda":
        return ""
    for variable in _ALLOCATOR_VARIABLES:
        options = _allocator_options(environment.get(variable, ""))
        if options.get("expandable_segments", "false") == "true":
            return (
                f"memory of expandable segments cannot be exported by CUDA IPC; take expandable_segments:True out of "
                f"{variable}"
            )
        if options.get("backend", "native") == "cudamallocasync":
            return f"cudaMallocAsync's memory cannot be exported by CUDA IPC; take backend out of {variable}"
    return ""


def _allocator_options(text: str) -> dict[str, str]:
    pairs = (option.partition(":") for option in text.split(",") if ":" in option)
    return {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


def missing_attributes(config: type, step: type, request: type, connector: type) -> list[str]:
    """Return what the connector needs of VllmConfig, SchedulerOutput, Request and KVConnectorBase_V1 but is missing."""
    wanted: tuple[tuple[type, Iterable[str]], ...] = (
        (config, _CONFIG),
        (step, _STEP),
        (request, _REQUEST),
        (connector, _CONNECTOR),
    )
    return [f"{kind.__name__}.{name}" for kind, names in wanted for name in names if not _has(kind, name)]


def _has(kind: type[Any], name: str) -> bool:
    if hasattr(kind, name) or (
        dataclasses.is_dataclass(kind) and name in {field.name for field in dataclasses.fields(kind)}
    ):
        return True
    code = getattr(kind.__init__, "__code__", None)
    return code is not None and name in code.co_names  # set there, as vLLM's plain classes do
