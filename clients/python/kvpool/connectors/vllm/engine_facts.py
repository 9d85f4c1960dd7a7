"""What is read of vLLM's configuration, and of the vLLM objects that call a connector."""

from __future__ import annotations

import hashlib
import inspect
import secrets
import weakref
from collections.abc import Callable
from typing import Any

from kvpool.connectors.vllm.settings import LAYOUT_BLOCK_MAJOR, LAYOUT_NONE, VllmSettings

_NO_VERSION = "default"  # what vLLM has until it is given one
_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")  # methods of speculation that write no KV


def outer_config(vllm_config: Any) -> Any:
    """The configuration that vLLM itself goes by, of which MultiConnector gives its children altered copies.

    The original is known to MultiConnector alone, which does not pass it on: it is read where MultiConnector, which is
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


class WeightVersion:
    """The version of the engine's weights that vLLM was given (`finish_weight_update`). In the engine core's process.

    vLLM keeps it in its engine core, which no connector is handed: it is looked for among the callers of a connector.
    """

    def __init__(self) -> None:
        self._core: weakref.ref[Any] | None = None

    def look_for_core(self) -> None:
        """To be called by a method that the engine core calls, until it was found."""
        frame = inspect.currentframe() if self._core is None else None
        while frame is not None:
            caller = frame.f_locals.get("self")
            if hasattr(type(caller), "get_weight_version") and hasattr(caller, "scheduler"):
                self._core = weakref.ref(caller)
                return
            frame = frame.f_back

    def __call__(self) -> str | None:
        """None if the engine core is not known."""
        core = self._core() if self._core is not None else None
        return core.get_weight_version() if core is not None else None


class WeightsEpoch:
    """What makes the hashes of KV unlike those of other weights. Empty for the weights that the engine began with.

    Engines with the same version share. After a reset that no new version followed the weights may be any: then the
    engine shares with no other.
    """

    def __init__(self, version: Callable[[], str | None]) -> None:
        """version: None or "default" as long as there is none."""
        self._version = version
        self._reset_at: str | None = None  # the version then
        self._random = b""
        self._hashed: tuple[str, bytes] = ("", b"")

    def reset(self) -> None:
        """The weights may be others from now on, or when the version changes."""
        self._reset_at, self._random = self._version(), secrets.token_bytes(16)

    def epoch(self) -> bytes:
        """Of the weights now; 16 bytes or empty."""
        version = self._version()
        if version in (None, _NO_VERSION):
            return self._random
        if self._random and version == self._reset_at:
            return self._random
        if version != self._hashed[0]:
            self._hashed = version, hashlib.blake2b(version.encode(), digest_size=16, person=b"weight version").digest()
        return self._hashed[1]

    def shared_with(self) -> str:
        """For the log."""
        if self.epoch() == self._random:
            return "with no other until it is given a weight version or started again"
        return f"with those of weight version {self._version()}"
