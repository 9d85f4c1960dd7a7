"""Reads vLLM's configuration, and the vLLM objects that call a connector."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import secrets
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from kvpool.connectors.vllm.settings import LAYOUT_BLOCK_MAJOR, LAYOUT_NONE, VllmSettings
from kvpool.connectors.vllm.step_jobs import StepJobs

_NO_VERSION = "default"  # what vLLM has until it is given one
_STEP_POLL_S = 0.001
_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")  # methods of speculation that write no KV


def outer_config(vllm_config: Any) -> Any:
    """Return vLLM's own configuration, of which MultiConnector gives its children modified copies.

    MultiConnector does not pass the original on: it is read from MultiConnector's frame on the stack, which is creating
    the child or calling its class. Returns `vllm_config` for a connector that is not a child.
    """
    outermost = vllm_config
    for frame in _with_callers(inspect.currentframe()):
        if str(frame.f_globals.get("__name__")).endswith(".kv_connector.v1.multi_connector"):
            outermost = frame.f_locals.get("vllm_config", outermost)
    return outermost


def _with_callers(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, and those of its callers outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def configs_of_caller() -> tuple[Any, Any] | None:
    """Return vLLM's configuration and its KV cache configuration, as a connector was given them that is creating the
    caller; None if there is none.

    A secondary tier is given neither: they are read from the frame of the connector that creates the tier.
    """
    for frame in _with_callers(inspect.currentframe()):
        vllm_config, kv_cache_config = (frame.f_locals.get(name) for name in ("vllm_config", "kv_cache_config"))
        if hasattr(vllm_config, "model_config") and hasattr(kv_cache_config, "kv_cache_groups"):
            return vllm_config, kv_cache_config
    return None


def loads_wait_for_work(vllm_config: Any, outer: Any, *, is_fenced: bool) -> bool:
    """Whether GPU work launched earlier may write to the blocks of a load that starts now.

    It cannot if a step is scheduled only after the previous one has ended, or if vLLM defers freeing blocks until no
    running step writes to them (with overlapping steps and a connector that loads). But drafters may write after what
    vLLM takes as the end of a step. is_fenced: `compatibility.defers_freeing_blocks`.
    """
    speculation = vllm_config.speculative_config
    if speculation is not None and speculation.method not in _WITHOUT_KV:
        return True
    fenced = is_fenced and outer.kv_transfer_config.is_kv_consumer
    return bool(vllm_config.max_concurrent_batches > 1 and not fenced)


def zeroes_new_blocks(kv_cache_config: Any) -> bool:
    """Whether vLLM zeroes blocks when a request gets them."""
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def zeroes_loaded_blocks(kv_cache_config: Any, connector: type) -> bool:
    """Whether vLLM zeroes the blocks of a load on the GPU in the step that starts the load.

    vLLM 0.31 does so for models with recurrent state. Since 0.32 it asks the connector which groups are loaded, and
    skips their blocks.
    """
    return zeroes_new_blocks(kv_cache_config) and not hasattr(connector, "get_loaded_kv_cache_group_ids")


def required_kv_cache_layout(settings: VllmSettings, vllm_config: Any, outer: Any) -> str | None:
    """Return the KV cache layout to request from vLLM; None leaves the choice to vLLM.

    In a block-major layout a page of all heads is one contiguous run per block, which copy engines move at link speed.
    Children of a MultiConnector that request different layouts stop vLLM, so a child requests one only if configured.
    """
    if settings.kv_cache_layout:
        return None if settings.kv_cache_layout == LAYOUT_NONE else settings.kv_cache_layout
    on_gpu = str(vllm_config.device_config.device_type) == "cuda"
    # Beside recurrent state blocks of KV are large: backends may have to split them, which they cannot in this layout.
    recurrent = getattr(getattr(vllm_config, "model_config", None), "is_hybrid", False)
    return LAYOUT_BLOCK_MAJOR if on_gpu and outer is vllm_config and not recurrent else None


# Of each scheduler whose steps arrive in this process: how many have, and the jobs of the newest.
_arrivals: dict[str, tuple[int, weakref.ref[StepJobs]]] = {}


def step_arrives(jobs: StepJobs) -> None:
    """Note a step's jobs when they are built or unpickled: before the model runner gets the step."""
    if jobs.scheduler:
        jobs.arrival = _arrivals[jobs.scheduler][0] + 1 if jobs.scheduler in _arrivals else 1
        _arrivals[jobs.scheduler] = (jobs.arrival, weakref.ref(jobs))


class StepStart:
    """Whether the connector has been notified of every step that may have written to KV blocks.

    Model runner V2 zeroes the new blocks of a step, and copies into them, before it calls `handle_preemptions`: a block
    that was read in between may hold another request's data. A step's jobs arrive together with the list of those
    blocks, so a step that may write is one whose jobs have arrived. Waiting for the next `handle_preemptions` instead
    would not work: an idle engine makes none. Nor would looking for the model runner on the stack of its thread: while
    that thread runs, CPython 3.11 may return frames that have been freed, and a walk may miss callers of a generator.
    """

    def __init__(self) -> None:
        # Of the last step that the connector has been notified of.
        self._scheduler, self._step, self._arrival = "", 0, 0

    def step_begins(self, jobs: StepJobs) -> None:
        """Called by `handle_preemptions` after what the step writes to has been noted."""
        self._scheduler, self._step, self._arrival = jobs.scheduler, jobs.step, jobs.arrival

    def misses_steps(self, jobs: StepJobs) -> bool:
        """Whether steps before this one have failed before the connector was notified: what they wrote to is not
        known."""
        return bool(jobs.scheduler) and jobs.scheduler == self._scheduler and 0 < self._step < jobs.step - 1

    @property
    def is_current(self) -> bool:
        """Whether the connector has been notified of all steps that have begun: `passed` would return True at once."""
        return self._scheduler not in _arrivals or self._arrival >= _arrivals[self._scheduler][0]

    async def passed(self) -> bool:
        """Return once the connector has been notified of all steps that had begun before the call. Runs on any event
        loop. False: one of them has failed before, and what it wrote to is not known."""
        if self.is_current:
            return True
        newest, jobs = _arrivals[self._scheduler]
        while self._arrival < newest:
            if jobs() is None:
                return self._arrival >= newest  # the connector may have been notified just before
            await asyncio.sleep(_STEP_POLL_S)  # steps begin on a thread that must not wait for this one
        return True


class WeightVersion:
    """Version of the engine's weights as given to vLLM (`finish_weight_update`). Lives in the engine core's process.

    vLLM keeps it in its engine core, which is not passed to connectors: it is found among the callers of a connector.
    """

    def __init__(self) -> None:
        self._core: weakref.ref[Any] | None = None

    def find_engine_core(self) -> None:
        """Look for the engine core on the stack. Call it from a method that the engine core calls."""
        for frame in _with_callers(inspect.currentframe() if self._core is None else None):
            caller = frame.f_locals.get("self")
            if hasattr(type(caller), "get_weight_version") and hasattr(caller, "scheduler"):
                self._core = weakref.ref(caller)
                return

    def __call__(self) -> str | None:
        """Return the version; None if the engine core is not known."""
        core = self._core() if self._core is not None else None
        return core.get_weight_version() if core is not None else None


class WeightsEpoch:
    """Bytes mixed into chunk hashes so that KV of different weights never matches. Empty for the initial weights.

    Engines with the same weight version share. After a reset without a new version the weights may be any: then the
    engine shares with no other.
    """

    def __init__(self, version: Callable[[], str | None]) -> None:
        """version: returns None or "default" while no version has been given."""
        self._version = version
        self._reset_at: str | None = None  # the version then
        self._random = b""
        self._hashed: tuple[str, bytes] = ("", b"")

    def reset(self) -> None:
        """The weights may change now, or when the version changes."""
        self._reset_at, self._random = self._version(), secrets.token_bytes(16)

    def epoch(self) -> bytes:
        """Return the epoch of the current weights: 16 bytes or empty."""
        version = self._version()
        if version in (None, _NO_VERSION):
            return self._random
        if self._random and version == self._reset_at:
            return self._random
        if version != self._hashed[0]:
            self._hashed = version, hashlib.blake2b(version.encode(), digest_size=16, person=b"weight version").digest()
        return self._hashed[1]

    def shared_with(self) -> str:
        """Return for the log with whom the engine shares."""
        if self.epoch() == self._random:
            return "with no other until it is given a weight version or started again"
        return f"with those of weight version {self._version()}"
