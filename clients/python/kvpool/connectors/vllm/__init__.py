"""Shared prefixes for vLLM's V1 engine, as a KV connector:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvPoolConnector",
        "kv_connector_module_path": "kvpool.connectors.vllm", "kv_role": "kv_both",
        "kv_connector_extra_config": {"agent": "unix:/path/of/agent.sock"}}'

`settings` has what the extra config may hold. vLLM is imported when it asks for the connector, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.connectors.vllm.connector import KvPoolConnector as KvPoolConnector

__all__ = ["KvPoolConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvPoolConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpool.connectors.vllm import compatibility

    try:
        from kvpool.connectors.vllm.connector import KvPoolConnector

        why = compatibility.incompatibility(KvPoolConnector)
    except ImportError as error:
        why = compatibility.incompatible_vllm(str(error))
    if why:
        from kvpool.connectors.vllm.disabled_connector import disabled_connector

        return disabled_connector(why)
    return KvPoolConnector
