"""Whether the installed vLLM has what the connector reads and is asked; its interface changes between releases."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

TESTED = "0.32.0"
_STEP = ("num_scheduled_tokens", "preempted_req_ids", "kv_connector_block_state")
_REQUEST = (
    *("request_id", "all_token_ids", "num_prompt_tokens", "num_tokens", "num_computed_tokens", "num_in_flight_tokens"),
    *("num_preemptions", "cache_salt", "lora_request", "mm_features", "prompt_embeds", "resumable"),
    *("skip_reading_prefix_cache", "trace_headers"),
)
_CONNECTOR = (
    *("on_new_request", "update_connector_output", "take_events", "reset_cache", "requires_kv_delivery"),
    *("handle_preemptions", "get_transfer_results", "get_block_ids_with_load_errors", "build_connector_worker_meta"),
)
_CONFIG = ("kv_transfer_config", "kv_events_config", "max_concurrent_batches")


def not_served(cause: str) -> str:
    """For whoever installed another vLLM."""
    import vllm

    return (
        f"kvpool.connectors.vllm does not fit vLLM {getattr(vllm, '__version__', '?')}: {cause}. "
        f"It is tested with {TESTED}: install that, or a kvpool made for your vLLM"
    )


def missing(config: type, step: type, request: type, connector: type) -> list[str]:
    """What the connector needs of VllmConfig, SchedulerOutput, Request and KVConnectorBase_V1 that is not there."""
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
