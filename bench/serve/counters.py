"""What servers say of themselves: Prometheus counters before and after a load, and the tiers that prompts came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.serve.api import RequestFailed
from bench.serve.http import get_text

_PREFIXES = ("kvpool_", "vllm:", "sglang:", "lmcache:")
_SIZE_BYTES_MAX = 64 << 20
_OWN_CACHE = ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total")
_CLAIMED = "vllm:external_prefix_cache_hits_total"
_PROMPTS = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_LOADED = "kvpool_gpuagent_loaded_tokens_total"

Counters = dict[str, float]  # sample as Prometheus writes it, labels sorted -> value


@dataclass(frozen=True, slots=True)
class Scrape:
    """Counters by URL, and why a URL gave none."""

    by_url: dict[str, Counters] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def metrics_url(text: str) -> str:
    """A URL of "host:9100", "http://host:9100" or a full one."""
    url = text if "://" in text else f"http://{text}"
    return url if "/" in url.partition("://")[2] else f"{url}/metrics"


def counters_from_text(text: str) -> Counters:
    """The counters of ours and of engines. Raises ValueError where it is no Prometheus text."""
    counters: Counters = {}
    for family in text_string_to_metric_families(text):
        if family.type != "counter" or not family.name.startswith(_PREFIXES):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            counters[key] = counters.get(key, 0.0) + sample.value
    return counters


async def scrape(session: aiohttp.ClientSession, urls: Sequence[str]) -> Scrape:
    """Read each once. A URL that does not answer goes to `failed`."""
    result = Scrape()
    for url in urls:
        try:
            result.by_url[url] = counters_from_text(await get_text(session, url, _SIZE_BYTES_MAX))
        except RequestFailed as error:
            result.failed[url] = str(error)
        except ValueError as error:
            result.failed[url] = f"no Prometheus text: {error}"
    return result


@dataclass(frozen=True, slots=True)
class Moved:
    """What counters rose by, all URLs together; those that went back, as after a restart; URLs without figures."""

    counters: Counters
    went_back: list[str]
    failed: dict[str, str]


def moved(before: Scrape, after: Scrape) -> Moved:
    """The difference. A counter that went back was reset: what it shows now is what it rose by at least."""
    rose: Counters = {}
    went_back = []
    for url, counters in after.by_url.items():
        earlier = before.by_url.get(url)
        if earlier is None:
            continue  # without a first look nothing can be said
        for name, value in counters.items():
            difference = value - earlier.get(name, 0.0)
            if difference < 0:
                went_back.append(f"{name} at {url}")
                difference = value
            rose[name] = rose.get(name, 0.0) + difference
    return Moved(rose, went_back, {**before.failed, **after.failed})


def tiers(counters: Mapping[str, float], prompt_tokens: int) -> dict[str, float] | None:
    """Prompt tokens by where their KV came from: own (the engine's cache), kvpool's sources, computed; None if unknown.

    prompt_tokens: as the generator counted them, for engines that do not tell.
    """
    own, claimed = _sum(counters, _OWN_CACHE), _sum(counters, (_CLAIMED,))
    loaded: dict[str, float] = {}
    for name, value in counters.items():
        if _bare(name) == _LOADED:
            source = name.partition('source="')[2].partition('"')[0] or "kvpool"
            loaded[source] = loaded.get(source, 0.0) + value
    if own is None and claimed is None and not loaded:
        return None
    if not loaded and claimed:
        loaded["external"] = claimed  # by the engine's word alone: no agent was asked
    total = _sum(counters, _PROMPTS) or float(prompt_tokens)
    known = (own or 0.0) + sum(loaded.values())
    return {"own": own or 0.0, **loaded, "computed": max(0.0, total - known)}


def _sum(counters: Mapping[str, float], names: Sequence[str]) -> float | None:
    found = [value for name, value in counters.items() if _bare(name) in names]
    return sum(found) if found else None


def _bare(name: str) -> str:
    return name.partition("{")[0]


def to_document(change: Moved, urls: Sequence[str]) -> dict[str, Any]:
    """For the result file."""
    return {
        "urls": list(urls),
        "counters": dict(sorted(change.counters.items())),
        "went_back": change.went_back,
        "failed": change.failed,
    }
