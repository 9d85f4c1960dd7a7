"""The connector for vLLM versions that KvPoolConnector does not support: the engine runs without kvpool."""

from __future__ import annotations

import functools
import logging
from typing import Any

from kvpool.connectors.vllm.settings import VllmSettings

_log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is said under its own name


@functools.cache
def disabled_connector(why: str) -> type:
    """Return a connector class, on the installed vLLM's base class, that never loads or stores anything.

    why: logged once by the engine's scheduler. raises: ImportError if there is no such base class.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    bases: list[type] = [base.KVConnectorBase_V1]
    if hasattr(base, "SupportsHMA"):  # without it vLLM would give up its cache manager for hybrid models
        bases.append(base.SupportsHMA)

    class KvPoolConnector(*bases):  # type: ignore[misc]  # a vLLM that may be any
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
            """raises: InvalidRequest for an extra config that must be changed."""
            VllmSettings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
            super().__init__(vllm_config, role, kv_cache_config)
            if role is base.KVConnectorRole.SCHEDULER:
                _log.error("kvpool: switched off, the engine runs without it: %s", why)

        @property
        def requires_kv_delivery(self) -> bool:
            return False

        def get_num_new_matched_tokens(self, *args: Any, **kwargs: Any) -> tuple[int, bool]:
            return 0, False

        def build_connector_meta(self, *args: Any, **kwargs: Any) -> Any:
            return base.KVConnectorMetadata()

        def request_finished_all_groups(self, *args: Any, **kwargs: Any) -> tuple[bool, None]:
            return False, None

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    # Calls that this release asks for beside those above; it has an answer of its own for all others.
    for name in getattr(KvPoolConnector, "__abstractmethods__", ()):
        setattr(KvPoolConnector, name, nothing)
    KvPoolConnector.__abstractmethods__ = frozenset()
    return KvPoolConnector
