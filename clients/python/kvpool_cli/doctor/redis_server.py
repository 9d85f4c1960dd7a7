"""The Redis behind the index: whether it keeps what is written to it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvpool_cli.doctor.clocks import lead_s
from kvpool_cli.doctor.finding import Finding, failure, ok, skipped, warning
from kvpool_cli.quantities import size

_TIMEOUT_S = 3.0
_SLOW_S = 0.002
_PINGS = 20
_FULL_SHARE = 0.8
_MIN_VERSION = (6, 2)
_SKEW_S = 2.0


def examine_redis(url: str) -> Iterator[Finding]:
    """Every server that the URL names; of Sentinels, the master that they name. raises: nothing."""
    import redis

    try:
        servers = list(_servers(redis, url))
    except (redis.RedisError, OSError, ValueError) as error:
        yield failure(
            "redis", f"{_without_password(url)} cannot be asked: {error}", "check the address, password and network"
        )
        return
    for name, client in servers:
        try:
            yield from examine_server(name, client)
        except (redis.RedisError, OSError) as error:
            yield failure("redis", f"{name} does not answer: {error}", "check the address, password and network")
        finally:
            client.close()


def _servers(redis: Any, url: str) -> Iterator[tuple[str, Any]]:
    parts = urlsplit(url)
    scheme, _, topology = parts.scheme.partition("+")
    options = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S, "decode_responses": True}
    if not topology:
        yield _without_password(url), redis.Redis.from_url(url, **options)
        return
    login, _, hosts = parts.netloc.rpartition("@")
    login += "@" if login else ""
    if topology == "cluster":
        for host in hosts.split(","):
            plain = urlunsplit((scheme, f"{login}{host}", "", parts.query, ""))
            yield host, redis.Redis.from_url(plain, **options)
        return
    sentinels = [(host.rpartition(":")[0] or host, int(host.rpartition(":")[2] or 26379)) for host in hosts.split(",")]
    service = parts.path.strip("/").partition("/")[0]
    query = dict(parse_qsl(parts.query))
    asking = options | {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    if scheme == "rediss":
        asking |= {"ssl": True} | {name: value for name, value in query.items() if name.startswith("ssl_")}
        asking["ssl_check_hostname"] = query.get("ssl_check_hostname", "true").lower() not in ("false", "0", "no")
    try:
        master, port = redis.Sentinel(sentinels, sentinel_kwargs=asking).discover_master(service)
    except redis.sentinel.MasterNotFoundError as error:  # which describes clients at length
        raise ValueError(f"no Sentinel that answers names a master called {service!r}") from error
    plain = urlunsplit((scheme, f"{login}{master}:{port}", "", urlencode(query), ""))
    yield f"{master}:{port}, the master of {service}", redis.Redis.from_url(plain, **options)


def examine_server(name: str, client: Any) -> Iterator[Finding]:
    """One server. raises: redis.RedisError, OSError."""
    info: Mapping[str, Any] = client.info()
    yield from _policy(name, info)
    yield from _persistence(name, client, info)
    version = tuple(int(part) for part in str(info.get("redis_version", "0")).split(".") if part.isdecimal())
    if version < _MIN_VERSION:
        wanted = ".".join(map(str, _MIN_VERSION))
        yield failure("redis_version", f"{name} has version {info.get('redis_version')}", f"at least {wanted}")
    times = []
    for _ in range(_PINGS):
        began_s = time.perf_counter()
        client.ping()
        times.append(time.perf_counter() - began_s)
    middle_s = sorted(times)[_PINGS // 2]
    if middle_s > _SLOW_S:
        yield warning(
            "redis_latency",
            f"{name} answers in {middle_s * 1e3:.1f} ms: each match waits for it",
            "a Redis nearer to the index",
        )
    else:
        yield ok("redis_latency", f"{name} answers in {middle_s * 1e3:.2f} ms")
    began_s = time.time()
    seconds, micros = client.time()
    server_s = seconds + micros / 1e6
    ahead_s = lead_s(server_s, server_s, began_s=began_s, ended_s=time.time())
    if abs(ahead_s) > _SKEW_S:
        yield failure(
            "clock",
            f"the clock of {name} is {ahead_s:+.1f} s beside ours",
            "run NTP or chrony on both: pins and times to live are wall times",
        )
    else:
        yield ok("clock", f"the clock of {name} is {ahead_s * 1e3:+.0f} ms beside ours")


def _policy(name: str, info: Mapping[str, Any]) -> Iterator[Finding]:
    limit, policy, used = (
        int(info.get("maxmemory", 0)),
        str(info.get("maxmemory_policy", "")),
        int(info.get("used_memory", 0)),
    )
    remediation = "CONFIG SET maxmemory-policy noeviction, and in its configuration file"
    if policy != "noeviction":
        level = failure if limit else warning
        yield level(
            "redis_policy", f"{name} has maxmemory-policy {policy}: it evicts leases and locations alike", remediation
        )
    else:
        yield ok("redis_policy", f"{name} evicts nothing")
    if limit and used > limit * _FULL_SHARE:
        yield failure(
            "redis_memory", f"{name} uses {size(used)} of {size(limit)}: full, it refuses writes", "raise maxmemory"
        )
    elif limit:
        yield ok("redis_memory", f"{name} uses {size(used)} of {size(limit)}")
    else:
        yield ok("redis_memory", f"{name} uses {size(used)}, without a limit")


def _persistence(name: str, client: Any, info: Mapping[str, Any]) -> Iterator[Finding]:
    import redis

    appends = str(info.get("aof_enabled", "0")) == "1"
    if info.get("rdb_last_bgsave_status", "ok") != "ok" or info.get("aof_last_write_status", "ok") != "ok":
        yield failure("redis_persistence", f"{name} could not write to its disk", "make room on its disk; see its log")
        return
    try:
        saves = bool(client.config_get("save").get("save"))
    except redis.ResponseError as error:  # hosted servers forbid CONFIG
        if not appends:
            yield skipped("redis_persistence", f"{name} does not tell whether it saves ({error})")
        return
    if appends or saves:
        yield ok("redis_persistence", f"{name} keeps {'an append-only file' if appends else 'snapshots'}")
    else:
        yield warning(
            "redis_persistence",
            f"{name} keeps nothing over a restart: matches miss until nodes have announced all again (a minute)",
            "CONFIG SET appendonly yes, or replicas behind Sentinels",
        )


def _without_password(url: str) -> str:
    """For messages."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "what --redis names"
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))
