"""Where the interfaces that vLLM 0.30 to 0.33 have for connectors and secondary tiers differ.

tests/fixtures/interfaces has what each release says of itself. The connector needs 0.31: before, steps that
compute nothing do not call `wait_for_save`, where stores begin, and blocks of finished requests would stay held.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any


def cache_hit_sources() -> Any | None:
    """The class CacheHitSource; None before 0.32, which asks for none."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ModuleNotFoundError:
        return None
    return CacheHitSource


def tier_arguments(tier_class: type, backpressure_detector: Any) -> tuple[Any, ...]:
    """What SecondaryTierManager takes after the tier's type: a detector since 0.31, which makes none before."""
    takes_detector = "backpressure_detector" in inspect.signature(tier_class).parameters
    return (backpressure_detector,) if takes_detector else ()


def job_result(result_class: type, *, transfer_bytes: int, **values: Any) -> Any:
    """A JobResult; since 0.31 it says how many bytes were moved."""
    if "transfer_bytes" in {one.name for one in fields(result_class)}:
        values["transfer_bytes"] = transfer_bytes
    return result_class(**values)


def steps_may_wait(offloading_spec: Any, schedule_end_context: type) -> bool:
    """Whether a step that computes nothing may wait for a load: vLLM says which requests it has scheduled, and that no
    other engine waits for this one's steps, as data-parallel engines do."""
    parallel = getattr(getattr(offloading_spec, "config", None), "parallel", None)
    is_alone = getattr(parallel, "data_parallel_size", 0) == 1
    return is_alone and "new_req_ids" in getattr(schedule_end_context, "_fields", ())
