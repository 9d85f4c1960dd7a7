"""From samples to the named cases of bench/results."""

from __future__ import annotations

from typing import Any

from bench.vllm_gpu.samples import Samples

Case = dict[str, Any]
_OWN = ("plain", "control")  # engines without a connector
_OFFLOADS = ("offload", "simple")


def cases(samples: Samples, token_bytes: int) -> dict[str, Case]:
    """All cases that the samples suffice for. `limit`: what the ratio, or the value, should not pass."""
    found: dict[str, Case] = {}
    _ttft(samples, token_bytes, found)
    _small(samples, found)
    _press(samples, found)
    _decode(samples, found)
    _delays(samples, found)
    _bytes(samples, found)
    _transfers(samples, found)
    _kills(samples, found)
    _pull_kills(samples, found)
    _ranks(samples, found)
    _pull(samples, found)
    return found


def _ttft(samples: Samples, token_bytes: int, found: dict[str, Case]) -> None:
    memcpy = samples.median("memcpy in", (*_OWN, "kvpool", "reader", "offload", "simple"))
    for tokens in sorted({*samples.keys("ttft computed"), *samples.keys("ttft loaded")}):
        plain = samples.median("ttft computed", "plain", key=tokens)
        own = samples.median("ttft own cache", "plain", key=tokens)
        loaded = samples.median("ttft loaded", "kvpool", key=tokens)
        stored = samples.median("ttft computed", "kvpool", key=tokens)
        _case(found, f"ttft {tokens} own cache", own, plain, "ms")
        if own is not None and memcpy:
            limit = own + 1.25 * tokens * token_bytes / memcpy / 1e6 + 8
            _case(found, f"ttft {tokens} loaded", loaded, plain, "ms", value_limit=round(limit, 1))
        else:
            _case(found, f"ttft {tokens} loaded", loaded, plain, "ms")
        firsts = samples.firsts("ttft loaded", "kvpool", key=tokens)
        _case(found, f"ttft {tokens} loaded first", firsts[0] if firsts else None, loaded, "ms", limit=1.2)
        _case(found, f"ttft {tokens} loaded share", samples.median("loaded share", "kvpool", key=tokens), 1.0, "share")
        _case(found, f"ttft store {tokens}", stored, plain, "ms", limit=1.02 if tokens >= 8192 else None)
        _case(found, f"matchable within 1 s {tokens}", _least(samples, "matchable", tokens), 1.0, "share", least=1.0)


def _small(samples: Samples, found: dict[str, Case]) -> None:
    memcpy = samples.median("memcpy in", (*_OWN, "kvpool", "reader"))
    size_bytes = samples.median("small load bytes", "kvpool")
    baseline = size_bytes / memcpy / 1e6 if size_bytes and memcpy else None  # ms, of GB/s
    _case(found, "small load", samples.median("small load", "kvpool"), baseline, "ms")
    own = samples.median("small ttft own cache", "kvpool")
    _case(found, "small ttft always loaded", samples.median("small ttft loaded", "kvpool"), own, "ms")
    loaded = samples.median("small ttft", "kvpool")
    _case(found, "small load ttft", loaded, own, "ms")
    if loaded is not None and own is not None:
        found["small load ttft"] |= {"difference_ms": round(loaded - own, 2), "limit_difference_ms": 5}


def _press(samples: Samples, found: dict[str, Case]) -> None:
    for number in samples.keys("press"):
        kvpool = samples.median("press", "kvpool", key=number)
        plain = samples.median("press", "plain", key=number)
        control = samples.median("press", "control", key=number)
        better = max((samples.median("press", kind, key=number) or 0.0 for kind in _OFFLOADS), default=0.0)
        if number == 1:  # in the first round the control computes as plain vLLM does
            _case(found, "press round 1", kvpool, plain or control, "tokens/s", least=0.98)
        else:
            _case(found, f"press round {number}", kvpool, better or None, "tokens/s", least=1.2)
            _case(found, f"press control round {number}", kvpool, control, "tokens/s", least=0.6)
        for kind in (*_OFFLOADS, "control"):
            _case(
                found, f"press {kind} {number}", samples.median("press", kind, key=number), plain or control, "tokens/s"
            )

    for name in sorted(samples.names("press of ") | samples.names("press closed ")):
        for number in samples.keys(name):
            control = samples.median(name, "control", key=number)
            better = max((samples.median(name, kind, key=number) or 0.0 for kind in _OFFLOADS), default=0.0)
            kvpool = samples.median(name, "kvpool", key=number)
            _case(found, f"{name} round {number}", kvpool, better or None, "tokens/s")
            _case(found, f"{name} control round {number}", kvpool, control, "tokens/s")


def _decode(samples: Samples, found: dict[str, Case]) -> None:
    kvpool, plain = (samples.median("decode", kind) for kind in ("kvpool", "plain"))
    _case(found, "decode", kvpool, plain, "tokens/s", least=0.99)
    paired = samples.paired("decode", "kvpool", "plain")
    if paired is not None:
        found["decode"] |= {"ratio": round(paired, 3), "runs": len(samples.values("decode", "kvpool"))}
    tokens, plain_tokens = (samples.median("cache tokens", kind) for kind in ("kvpool", "plain"))
    _case(found, "KV cache", tokens, plain_tokens, "tokens", least=0.99)
    left_out = samples.values("counter failed_store_chunks", "kvpool")
    if left_out:
        _case(
            found, "chunks not stored", sum(left_out), sum(samples.values("counter stored_chunks", "kvpool")), "chunks"
        )
    for name in ("declined_chunks", "failed_load_chunks"):
        counted = samples.values(f"counter {name}", "kvpool")
        loaded = sum(samples.values("counter loaded_chunks", "kvpool"))
        if counted and loaded:
            _case(found, name.replace("_", " "), sum(counted), loaded, "chunks")


def _delays(samples: Samples, found: dict[str, Case]) -> None:
    delays = samples.values("store delay p99", "kvpool")
    _case(found, "store delay p99", max(delays) if delays else None, 100.0, "ms", limit=1.0)
    memcpy = samples.median("memcpy out", "kvpool")  # of the same engine
    _case(found, "store rate", samples.median("store rate", "kvpool"), memcpy, "GB/s", least=0.7)
    if "store rate" in found:
        found["store rate"]["failed_chunks"] = sum(samples.values("store rate failed chunks", "kvpool"))


def _bytes(samples: Samples, found: dict[str, Case]) -> None:
    equal, unequal, unknown = (
        sum(samples.values(f"blocks {what}", "kvpool")) for what in ("equal", "unequal", "unknown")
    )
    if equal + unequal:
        _case(found, "right bytes", equal, equal + unequal, "blocks", least=1.0)
        found["right bytes"]["not_compared"] = unknown
    changed, again = (samples.median(f"{what} changes tokens", "kvpool") for what in ("zeroed", "loaded again"))
    if changed is not None:
        found["negative control"] = {"value": changed, "unit": "share", "baseline": again, "ratio": None}


def _transfers(samples: Samples, found: dict[str, Case]) -> None:
    limits = {"store": 0.95, "load": 0.93, "both": 0.9}
    for layout in samples.kinds("layout store"):
        for way, least in limits.items():
            value = samples.median(f"layout {way}", layout)
            _case(
                found,
                f"layout {layout} {way}",
                value,
                samples.median(f"layout {way} memcpy", layout),
                "GB/s",
                least=least,
            )
    for way, name, least in (("store", "stores", 0.97), ("load", "loads", 0.97), ("both", "both", 0.95)):
        for layout in samples.kinds(f"beside {way}"):
            value, alone = (samples.median(f"beside {way}{more}", layout) for more in ("", " alone"))
            _case(found, f"engine beside {name}, {layout}", value, alone, "tokens/s", least=least)


def _kills(samples: Samples, found: dict[str, Case]) -> None:
    for victim in samples.kinds("killed"):
        requests = sum(samples.values("requests beside kills", victim))
        failed = sum(samples.values("failed beside kills", victim))
        _case(found, f"kills {victim}", failed, requests, "failed requests", limit=0.0)
        found[f"kills {victim}"] |= {
            "kills": sum(samples.values("killed", victim)),
            "in_a_transfer": sum(samples.values("killed in a transfer", victim)),
            "loaded_chunks": sum(samples.values("chunks loaded beside kills", victim)),
        }


def _pull_kills(samples: Samples, found: dict[str, Case]) -> None:
    for victim in samples.kinds("killed in pulls"):
        requests = sum(samples.values("requests beside kills of pulls", victim))
        failed = sum(samples.values("failed beside kills of pulls", victim))
        _case(found, f"kills in pulls, {victim}", failed, requests, "failed requests", limit=0.0)
        found[f"kills in pulls, {victim}"] |= {"kills": sum(samples.values("killed in pulls", victim))}
        equal, unequal = (sum(samples.values(f"pulled blocks {what}", victim)) for what in ("equal", "unequal"))
        _case(found, f"right bytes of pulls, {victim}", equal, equal + unequal, "blocks of a head and layer", least=1.0)


def _ranks(samples: Samples, found: dict[str, Case]) -> None:
    for reader in samples.kinds("ranks equal"):
        equal, unequal, unknown = (
            sum(samples.values(f"ranks {what}", reader)) for what in ("equal", "unequal", "unknown")
        )
        name = f"right bytes of ranks {reader}"
        _case(found, name, equal, equal + unequal, "blocks of a head and layer", least=1.0)
        sources = {
            f"{source}_tokens": sum(samples.values(f"ranks {source} tokens", reader)) for source in ("gpu", "pool")
        }
        found[name] |= {"not_compared": unknown, **sources}
        shares = samples.values("ranks loaded share", reader)
        _case(found, f"loaded by ranks {reader}", min(shares, default=None), 1.0, "share")


def _pull(samples: Samples, found: dict[str, Case]) -> None:
    for tokens in samples.keys("pull ttft"):
        pulled, computed = (samples.median(name, "reader", key=tokens) for name in ("pull ttft", "pull computed"))
        _case(found, f"pull {tokens}", pulled, computed, "ms", limit=0.1 if tokens >= 16384 else None)
        _case(found, f"pull {tokens} share", samples.median("pull share", "reader", key=tokens), 1.0, "share")
    for number in samples.keys("two engines press"):
        both, one = (samples.median(name, "kvpool", key=number) for name in ("two engines press", "one engine press"))
        _case(found, f"press of two engines round {number}", both, one, "tokens/s", least=1.8)
        both, one = (
            samples.median(name, "kvpool", key=number) for name in ("two engines press share", "one engine press share")
        )
        _case(found, f"press of two engines round {number} share", both, one, "share")
    beside, alone = (samples.median(name, "kvpool") for name in ("pull decode", "pull decode alone"))
    _case(found, "decode of a source", beside, alone, "tokens/s", least=0.97)
    for layout in samples.kinds("peer pull"):
        for in_flight, least in ((4, 0.93), (1, 0.85)):
            value, memcpy = (
                samples.median(name, layout, key=in_flight) for name in ("peer pull", "memcpy between GPUs")
            )
            _case(found, f"{layout}, peer pull, 512 MiB x {in_flight}", value, memcpy, "GB/s", least=least)


def _least(samples: Samples, name: str, key: int) -> float | None:
    values = samples.values(name, "kvpool", key=key)
    return min(values) if values else None


def _case(
    found: dict[str, Case],
    name: str,
    value: float | None,
    baseline: float | None,
    unit: str,
    *,
    limit: float | None = None,
    least: float | None = None,
    value_limit: float | None = None,
) -> None:
    """limit and least: of the ratio."""
    if value is None:
        return
    ratio = round(value / baseline, 3) if baseline else None
    found[name] = {
        "value": round(value, 2),
        "unit": unit,
        "baseline": round(baseline, 2) if baseline is not None else None,
        "ratio": ratio,
    }
    limits = {"limit": limit, "least": least, "value_limit": value_limit}
    found[name] |= {key: bound for key, bound in limits.items() if bound is not None}
