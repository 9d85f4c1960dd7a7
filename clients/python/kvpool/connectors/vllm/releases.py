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


def steps_wait_for_others(offloading_spec: Any) -> bool:
    """Whether the steps of other engines may wait for this one's: of data-parallel engines, and where vLLM does not
    say how many there are."""
    parallel = getattr(getattr(offloading_spec, "config", None), "parallel", None)
    return getattr(parallel, "data_parallel_size", 0) != 1
