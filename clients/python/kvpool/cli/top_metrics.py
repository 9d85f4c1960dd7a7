"""What nodes say of themselves at /metrics: samples of Prometheus' text format, by name and one label."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

FETCH_TIMEOUT_S = 2.0
_SIZE_BYTES_MAX = 8 << 20
_AT_ONCE = 16
_SAMPLE = re.compile(r"(kvpool_[a-z0-9_]+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')

Samples = Mapping[tuple[str, str], float]
"""By name (kvpool_ and what follows it cut to the service's own part) and the value of the one label, "" for none."""


def samples_from_text(text: str) -> dict[tuple[str, str], float]:
    """Samples of ours; a line that is none is passed over, buckets of histograms too."""
    samples: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        found = _SAMPLE.fullmatch(line)
        if found is None or found[1].endswith(("_bucket", "_created")):
            continue
        labels = _LABEL.findall(found[2] or "")
        try:
            value = float(found[3])
        except ValueError:
            continue
        key = (found[1], labels[0][1] if len(labels) == 1 else "")
        samples[key] = samples.get(key, 0.0) + value
    return samples


async def fetch_all(urls: Sequence[str]) -> dict[str, Samples | str]:
    """Samples by URL, or why there are none; several at once, none longer than FETCH_TIMEOUT_S."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(url: str) -> Samples | str:
        async with places:
            return await asyncio.to_thread(_fetch, url)

    distinct = list(dict.fromkeys(urls))
    return dict(zip(distinct, await asyncio.gather(*map(one, distinct)), strict=True))


def _fetch(url: str) -> Samples | str:
    if urlsplit(url).scheme not in ("http", "https"):
        return f"{url or 'no address'} is no http address"
    # Nodes are reached as other nodes reach them, whatever proxy this user has for the web.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=FETCH_TIMEOUT_S) as answer:
            return samples_from_text(answer.read(_SIZE_BYTES_MAX).decode(errors="replace"))
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return f"{url} does not answer ({reason})"
