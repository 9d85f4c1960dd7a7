"""From samples to the named cases of bench/results."""

from __future__ import annotations

import statistics
from typing import Any

from bench.vllm_gpu.samples import Samples

Case = dict[str, Any]
_LOADED_SHARE = 0.9


def cases(samples: Samples) -> dict[str, Case]:
    """All cases that the samples suffice for, as medians; of `press` of paired runs. limit, least: of the ratio."""
    found: dict[str, Case] = {}

    def add(name: str, unit: str, value: float | None, baseline: float | None, **bounds: float) -> None:
        if value is not None:
            found[name] = {
                "value": round(value, 2),
                "unit": unit,
                "baseline": None if baseline is None else round(baseline, 2),
                "ratio": round(value / baseline, 3) if baseline else None,
                **bounds,
            }

    for tokens in samples.keys("ttft computed"):
        computed = samples.median("ttft computed", "tiering", key=tokens)
        add(
            f"ttft {tokens} computed with the tier", "ms", samples.median("ttft computed", "tier", key=tokens), computed
        )
        memory = _loaded(samples, "memory", "tier", tokens)
        add(f"ttft {tokens} from the pool's memory", "ms", memory, computed, limit=0.25)
        region = samples.median("ttft from region", "tier", key=tokens)
        add(f"ttft {tokens} from vLLM's CPU region", "ms", region, computed)
    for tokens in samples.keys("ttft from disk"):
        files, disk = (_loaded(samples, "disk", kind, tokens) for kind in ("fs", "tier"))
        add(f"ttft {tokens} from the pool's disk", "ms", disk, files, limit=0.7)
    for place, kind in (("memory", "tier"), ("disk", "tier"), ("disk", "fs")):
        shares = samples.values(f"share from {place}", kind)
        add(f"least share loaded from {place}, {kind}", "share", min(shares, default=None), 1.0)
    for other in samples.kinds("press"):
        ratio = samples.paired("press", "tier", other)
        if other == "tier" or ratio is None:
            continue
        bounds = {"least": 0.99} if other == "tiering" else {}
        add(
            f"press beside {other}",
            "tokens/s",
            samples.median("press", "tier"),
            samples.median("press", other),
            **bounds,
        )
        found[f"press beside {other}"] |= {"ratio": round(ratio, 3), "runs": len(samples.values("press", "tier"))}
        for number in samples.keys("press round"):
            values = (samples.median("press round", kind, key=number) for kind in ("tier", other))
            add(f"press beside {other}, round {number}", "tokens/s", *values)
    memcpy = samples.median("memcpy", "none")
    for name in ("store", "load from memory"):
        add(name, "GB/s", samples.median(name, "tier"), memcpy)
    for name in ("store", "load from disk"):
        add(f"{name} beside the file tier", "GB/s", samples.median(name, "tier"), samples.median(name, "fs"))
    equal, unequal = (sum(samples.values(f"blocks {what}", "tier")) for what in ("equal", "unequal"))
    if equal + unequal:
        add("right bytes", "blocks", equal, equal + unequal, least=1.0)
    return found


def _loaded(samples: Samples, place: str, kind: str, tokens: int) -> float | None:
    """The median of first tokens of prompts that were loaded, not computed because some chunk of them was missing."""
    shares = samples.values(f"share from {place}", kind)
    times = [
        ms
        for ms, share in zip(samples.values(f"ttft from {place}", kind, key=tokens), shares, strict=True)
        if share > _LOADED_SHARE
    ]
    return statistics.median(times) if times else None
