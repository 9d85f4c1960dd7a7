"""The cluster as it is seen from here: what it says of itself, whether nodes can be reached, clocks and versions."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any
from urllib.parse import urlsplit

from kvpool import __version__
from kvpool.core.errors import InvalidRequest
from kvpool_cli.doctor.clocks import lead_s
from kvpool_cli.doctor.finding import Finding, failure, ok, skipped, warning
from kvpool_cli.top_metrics import Samples, fetch_all, in_threads, metrics_answer

_CONNECT_TIMEOUT_S = 2.0
_AT_ONCE = 32
_INFO = "kvpool_process_info"
_SKEW_S = 2.0  # the Date of an answer has whole seconds


def examine_status(document: Mapping[str, Any]) -> Iterator[Finding]:
    """What `kvpool cluster status --check` would say, and versions."""
    index = document["index"]
    for problem in document["problems"]:
        yield failure(
            "cluster",
            problem,
            "`kvpool cluster status` has the whole picture, `kvpool cluster logs` or the node's log the cause",
        )
    if not document["problems"]:
        yield ok("cluster", f"{len(document['nodes'])} nodes, store {document['store']['kind']} reachable")
    if _release(index["version"]) != _release(__version__):
        yield warning(
            "version",
            f"the index is of version {index['version']}, this kvpool of {__version__}",
            "upgrade one minor version at a time, the index first",
        )
    else:
        yield ok("version", f"index {index['version']}, this kvpool {__version__}")


def _release(text: str) -> tuple[str, ...]:
    return tuple(text.split(".")[:2])


async def examine_nodes(nodes: Sequence[Mapping[str, Any]], *, is_embedded: bool) -> list[Finding]:
    """Whether every address that nodes advertise can be reached, and means the same on another host."""
    places = asyncio.Semaphore(_AT_ONCE)
    asked: list[tuple[str, str, str]] = []
    findings: list[Finding] = []
    hosts = {node["host_id"] for node in nodes}
    for node in nodes:
        name = f"{node['kind']} {node['host_id']}"
        for what in ("endpoint", "bulk_endpoint"):
            if node[what]:
                asked.append((name, what, node[what]))
        if not is_embedded and len(hosts) > 1 and _is_loopback(node["endpoint"]):
            findings.append(
                failure(
                    "advertised",
                    f"{name} advertises {node['endpoint']}, which is themselves",
                    "start it with --advertise-host NAME, --listen 0.0.0.0:7200 and --bulk-listen 0.0.0.0:7201",
                )
            )

    async def look_at(name: str, what: str, endpoint: str) -> Finding | None:
        host, _, port = endpoint.rpartition(":")
        async with places:
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                writer.close()
                return None
            except (OSError, TimeoutError, ValueError) as error:
                why = str(error) or f"no answer within {_CONNECT_TIMEOUT_S:g} s"
                return failure(
                    "reachable",
                    f"{name} cannot be reached at {endpoint} ({what}): {why}",
                    "open the port in firewalls and NetworkPolicy",
                )

    unreached = [one for one in await asyncio.gather(*(look_at(*each) for each in asked)) if one is not None]
    findings += unreached or ([ok("reachable", f"all {len(asked)} addresses of nodes can be reached")] if asked else [])
    urls = [node["metrics_url"] for node in nodes if node["metrics_url"]]
    findings += await _clocks(urls)
    findings += versions(await fetch_all(urls))
    return findings


def versions(metrics: Mapping[str, Samples | None]) -> list[Finding]:
    """Of the nodes whose /metrics can be reached: one minor version apart is fine while an upgrade goes on."""
    found: Counter[str] = Counter()
    for samples in metrics.values():
        found.update(label for name, label in samples or () if name == _INFO)
    if not found:
        return []
    listed = ", ".join(f"{count} of {name}" for name, count in sorted(found.items()))
    if len({_release(name) for name in found}) > 1:
        remediation = (
            "upgrade the rest, one minor version at a time; a mixture is for the time of a rolling upgrade only"
        )
        return [warning("node_versions", f"nodes have several versions: {listed}", remediation)]
    return [ok("node_versions", f"nodes: {listed}")]


async def _clocks(urls: Sequence[str]) -> list[Finding]:
    skews = await in_threads(clock_skew_s, urls)
    known = {url: skew_s for url, skew_s in zip(urls, skews, strict=True) if skew_s is not None}
    off = [
        failure(
            "clock",
            f"the clock behind {url} is {skew_s:+.0f} s beside ours",
            "run NTP or chrony: pins and times to live are wall times",
        )
        for url, skew_s in known.items()
        if abs(skew_s) > _SKEW_S
    ]
    if not known:
        return [skipped("clock", "no node's /metrics can be reached from here, so that clocks cannot be compared")]
    return off or [ok("clock", f"the clocks of {len(known)} nodes agree with ours to {_SKEW_S:g} s")]


def clock_skew_s(url: str) -> float | None:
    """How far the clock of an HTTP server is ahead of ours; None where it reports none. Blocking."""
    try:
        if urlsplit(url).scheme != "http":
            return None
        began_s = time.time()
        with metrics_answer(url) as answer:
            server_s = parsedate_to_datetime(answer.headers["Date"]).timestamp()
        # A date has no fractions.
        return lead_s(server_s, server_s + 1.0, began_s=began_s, ended_s=time.time())
    except (OSError, ValueError, TypeError, HTTPException, InvalidRequest):
        return None


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def examine_packages() -> Iterator[Finding]:
    """Whether what is installed here is what this kvpool needs: engines' environments pin their own."""
    try:
        needed = [line for line in requires("kvpool") or () if "extra ==" not in line]
    except PackageNotFoundError:
        yield skipped("packages", "kvpool is not installed as a package here")
        return
    wrong = []
    for line in needed:
        name, _, least = line.partition(">=")
        try:
            found = version(name.strip())
        except PackageNotFoundError:
            wrong.append(f"{name.strip()} is missing")
            continue
        if least and _numbers(found) < _numbers(least):
            wrong.append(f"{name.strip()} {found} is older than {least}")
    if wrong:
        yield failure(
            "packages", "; ".join(wrong), "pip install /path/to/checkout, or the path of a wheel, in this environment"
        )
    else:
        yield ok("packages", f"{len(needed)} packages that kvpool needs are there")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",")[0].strip().split(".") if part.isdecimal())
