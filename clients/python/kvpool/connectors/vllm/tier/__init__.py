"""kvpool as a secondary tier of vLLM's own offloading: what vLLM keeps in its CPU region is shared by all servers.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
            "secondary_tiers": [{"type": "KvPoolTier", "module_path": "kvpool.connectors.vllm.tier",
                "index_endpoints": ["127.0.0.1:7100"], "pagestore": "unix:/run/kvpool/pagestore.sock",
                "model_revision": "main-2026-11-01"}]}}'

vLLM's primary tier is that region. Its promotion of a chunk is a load here, its cascade to this tier a store; RETRY is
"no answer yet", and HIT_PENDING means that a load is under way. One of vLLM's chunks, blocks_per_chunk blocks of one
KV cache group, is one object in the cluster.

`settings` has what the tier's JSON may hold. vLLM is imported when it asks for the class, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.connectors.vllm.tier.manager import KvPoolTier as KvPoolTier

__all__ = ["KvPoolTier"]


def __getattr__(name: str) -> Any:
    if name != "KvPoolTier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvpool.connectors.vllm.tier.manager import KvPoolTier

    return KvPoolTier
