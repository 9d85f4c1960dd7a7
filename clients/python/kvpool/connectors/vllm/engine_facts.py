"""What is read of vLLM's configuration, and of the vLLM objects that call a connector."""

from __future__ import annotations

import inspect
from typing import Any

from kvpool.connectors.vllm.settings import LAYOUT_BLOCK_MAJOR, LAYOUT_NONE, VllmSettings

_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")  # methods of speculation that write no KV


def outer_config(vllm_config: Any) -> Any:
    """The configuration that vLLM itself goes by, of which MultiConnector gives its children altered copies.

    The original is known to MultiConnector alone, and it hands it to nobody: it is read where MultiConnector, which is
    making the child or asking its class, has it. Returns `vllm_config` for a connector that is no child.
    """
    outermost, frame = vllm_config, inspect.currentframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).endswith(".kv_connector.v1.multi_connector"):
            outermost = frame.f_locals.get("vllm_config", outermost)
        frame = frame.f_back
    return outermost


def loads_wait_for_work(vllm_config: Any, outer: Any) -> bool:
    """Whether GPU work that was launched before may write to the blocks of a load that is begun now.

    It does not where a step is scheduled only when the one before has ended, and where vLLM gives out blocks only when
    no step that is under way writes to them (its `defer_block_free`: it overlaps steps, and its connector loads). But
    models that draft may write after what vLLM takes for the end of a step.
    """
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method not in _WITHOUT_KV:
        return True
    return bool(vllm_config.max_concurrent_batches > 1 and not outer.kv_transfer_config.is_kv_consumer)


def wanted_layout(settings: VllmSettings, vllm_config: Any, outer: Any) -> str | None:
    """The KV cache layout to ask vLLM for; None: its own choice.

    In a block-major one a page of all heads is one run a block, which copy engines move at link speed. Children of a
    MultiConnector that ask for different ones stop vLLM: there it is asked for only by configuration.
    """
    if settings.kv_cache_layout:
        return None if settings.kv_cache_layout == LAYOUT_NONE else settings.kv_cache_layout
    on_gpu = str(vllm_config.device_config.device_type) == "cuda"
    return LAYOUT_BLOCK_MAJOR if on_gpu and outer is vllm_config else None
