"""What nodes say of themselves at /metrics: samples of Prometheus' text format, by name and one label."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TypeVar
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from kvpool.core.addresses import check_metrics_url
from kvpool.core.errors import InvalidRequest

ResultT = TypeVar("ResultT")

FETCH_TIMEOUT_S = 2.0
_SIZE_BYTES_MAX = 8 << 20
_AT_ONCE = 128  # a host that is out of reach costs the whole timeout
_PIECE_BYTES = 64 << 10

Samples = Mapping[tuple[str, str], float]
"""By name (kvpool_ and what follows it cut to the service's own part) and the value of the one label, "" for none."""


def samples_from_text(text: str) -> dict[tuple[str, str], float]:
    """Finite samples of ours, without the buckets of histograms. Raises ValueError for what is not the text format."""
    samples: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("kvpool_") or sample.name.endswith(("_bucket", "_created")):
                continue
            if math.isfinite(sample.value):
                label = next(iter(sample.labels.values())) if len(sample.labels) == 1 else ""
                samples[sample.name, label] = samples.get((sample.name, label), 0.0) + sample.value
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


@contextmanager
def metrics_answer(url: str) -> Iterator[HTTPResponse]:
    """The answer to a URL that a node registered: http(s)://host:port/metrics, without redirects and proxies.

    The connection ends FETCH_TIMEOUT_S after it was made, whatever comes on it. Blocking; raises InvalidRequest for
    another form of URL, OSError, ValueError and HTTPException for what does not answer.
    """
    parts = urlsplit(check_metrics_url(url, "metrics_url"))
    connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = connect(parts.netloc, timeout=FETCH_TIMEOUT_S)
    is_late = threading.Event()
    connection.connect()
    ending = threading.Timer(FETCH_TIMEOUT_S, _end, (connection.sock, is_late))  # the answer takes the socket over
    ending.daemon = True
    ending.start()
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            raise OSError(f"{url} answers with status {answer.status}")
        yield answer
        if is_late.is_set():  # what is cut off looks like the end of the answer
            raise TimeoutError(f"{url} did not answer within {FETCH_TIMEOUT_S:g} s")
    finally:
        ending.cancel()
        connection.close()


def _end(connected: socket.socket, is_late: threading.Event) -> None:
    is_late.set()
    with contextlib.suppress(OSError):  # it has ended already
        connected.shutdown(socket.SHUT_RDWR)


def _fetch(url: str) -> Samples | None:
    body = bytearray()
    try:
        with metrics_answer(url) as answer:
            while len(body) < _SIZE_BYTES_MAX and (piece := answer.read1(_PIECE_BYTES)):
                body += piece
            if answer.length and len(body) < _SIZE_BYTES_MAX:
                return None  # the connection ended before the answer did
        return samples_from_text(body.decode(errors="replace"))
    except (OSError, ValueError, HTTPException, InvalidRequest):
        return None
