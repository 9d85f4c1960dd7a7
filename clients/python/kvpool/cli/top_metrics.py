"""What nodes say of themselves at /metrics: samples of Prometheus' text format, by name and one label."""

from __future__ import annotations

import asyncio
import math
import re
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import TypeVar
from urllib.parse import urlsplit

ResultT = TypeVar("ResultT")

FETCH_TIMEOUT_S = 2.0
_SIZE_BYTES_MAX = 8 << 20
_AT_ONCE = 128  # a host that is out of reach costs the whole timeout
_PIECE_BYTES = 64 << 10
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
        if not math.isfinite(value):
            continue
        key = (found[1], labels[0][1] if len(labels) == 1 else "")
        samples[key] = samples.get(key, 0.0) + value
    return samples


async def fetch_all(urls: Sequence[str]) -> dict[str, Samples | None]:
    """Samples by URL, None where there are none to be had; none is waited for longer than FETCH_TIMEOUT_S."""
    distinct = list(dict.fromkeys(urls))
    return dict(zip(distinct, await in_threads(_fetch, distinct), strict=True))


async def in_threads(work: Callable[[str], ResultT], items: Sequence[str]) -> list[ResultT]:
    """Work on all at once, in threads of their own: the loop's few would let hosts out of reach wait one by one."""
    if not items:
        return []
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(min(_AT_ONCE, len(items)), "kvpool cli") as threads:
        return list(await asyncio.gather(*(loop.run_in_executor(threads, work, item) for item in items)))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A node says where its metrics are when it registers, and nowhere else."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        return None


def metrics_opener() -> urllib.request.OpenerDirector:
    """For URLs that nodes registered: as other nodes reach them, whatever proxy this user has for the web."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())


def _fetch(url: str) -> Samples | None:
    opener = metrics_opener()
    ends_s = time.monotonic() + FETCH_TIMEOUT_S
    try:
        if urlsplit(url).scheme not in ("http", "https"):
            return None
        body = bytearray()
        with opener.open(url, timeout=FETCH_TIMEOUT_S) as answer:
            while len(body) < _SIZE_BYTES_MAX and (piece := answer.read1(_PIECE_BYTES)):
                body += piece
                if time.monotonic() > ends_s:  # it trickles
                    return None
        return samples_from_text(body.decode(errors="replace"))
    except (OSError, ValueError, HTTPException):  # also for an address that is none, and for what is no HTTP
        return None
