"""The URL of a Redis (one server, a master that Sentinels name, or a Cluster), and TLS to it.

    redis://[user:password@]host:port/db               rediss:// with TLS, unix://path
    redis+sentinel://[user:password@]host:port,host:port/service[/db]     rediss+sentinel:// with TLS
    redis+cluster://[user:password@]host:port,host:port                   rediss+cluster:// with TLS

Options after `?`: ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_check_hostname=false; for Sentinels sentinel_username
and sentinel_password, because user and password are those of the servers that hold the data. The files of TLS may be
renewed while the index runs.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio.connection import URL_QUERY_ARGUMENT_PARSERS, parse_url

from kvpool_index.adapters.redis_wire import pack

_log = logging.getLogger(__name__)

HINT_PLAIN: Final = "if that port expects TLS, write rediss:// for redis://"
HINT_TLS: Final = "if it demands a client certificate, name one of a CA that it trusts by ssl_certfile and ssl_keyfile"
"""Hints for a connection that ends before the first answer. Redis may also have stopped."""

_EXPLANATIONS: Final = (
    ("SSL handshake is taking longer", "it does not speak TLS, or is too busy: if it has none, write redis://"),
    ("WRONG_VERSION_NUMBER", "it answers in the clear: write redis:// for rediss://, or name its TLS port"),
    ("record layer failure", "it answers in the clear: write redis:// for rediss://, or name its TLS port"),
    ("certificate has expired", "its certificate has expired: renew it"),
    ("certificate is not yet valid", "its certificate is not valid yet: look at the clocks of both hosts"),
    ("unsuitable certificate purpose", "its certificate is not for servers: issue it for serverAuth"),
    (
        "IP address mismatch",
        "its certificate does not name that address: issue another, or set ssl_check_hostname=false",
    ),
    ("Hostname mismatch", "its certificate does not name that host: issue another, or set ssl_check_hostname=false"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is of no CA that is trusted: name its CA by ?ssl_ca_certs=FILE"),
    ("CERTIFICATE_REQUIRED", "it demands a client certificate: name one by ?ssl_certfile=FILE&ssl_keyfile=FILE"),
    ("ALERT_CERTIFICATE_EXPIRED", "it says that ssl_certfile has expired: renew it"),
    ("ALERT_UNKNOWN_CA", "it does not trust the CA of ssl_certfile: give one of a CA in Redis's tls-ca-cert-file"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """What a URL says of TLS. Without ca_file the system's authorities count."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None  # None: it is in cert_file
    check_hostname: bool = True

    def files(self) -> list[Path]:
        """All there are."""
        return [path for path in (self.ca_file, self.cert_file, self.key_file) if path is not None]


class RedisTls:
    """The context of connections made from now on. Use from one event loop only."""

    def __init__(self, options: TlsOptions) -> None:
        """Reads the files. Raises OSError, of which ssl.SSLError is one, if they cannot be used."""
        self.options = options
        self._state = _state(options)
        self._context = _new_context(options)

    def context(self) -> ssl.SSLContext:
        """By the files as they are now, or as they were when they could last be used."""
        state = _state(self.options)
        if state != self._state:
            self._state = state  # also if they cannot be used: they are tried, and logged, once
            try:
                self._context = _new_context(self.options)
                _log.info("the TLS files of redis_url were renewed and are in use")
            except OSError as error:
                _log.warning("the renewed TLS files of redis_url are not used, the last ones stay in use: %s", error)
        return self._context


def explain_tls(error: OSError) -> str:
    """The error of a connection to Redis in its own words, and what to do if it is about TLS."""
    said = str(error)
    for words, explanation in _EXPLANATIONS:
        if words.lower() in said.lower():
            return f"{explanation} ({said})"
    return said


def _state(options: TlsOptions) -> list[tuple[int, ...]] | str:
    """What changes when a file is written, replaced, or goes away."""
    try:
        found = [path.stat() for path in options.files()]
    except OSError as error:
        return str(error)
    return [(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns) for status in found]


def _new_context(options: TlsOptions) -> ssl.SSLContext:
    for path in options.files():
        path.stat()  # whose error names the file, which OpenSSL's does not
    context = ssl.create_default_context(cafile=options.ca_file)
    context.check_hostname = options.check_hostname  # the certificate is verified in any case
    if options.cert_file is not None:
        context.load_cert_chain(options.cert_file, options.key_file, password=_no_passphrase)
    return context


def _no_passphrase() -> NoReturn:
    """OpenSSL would ask on the terminal, and the event loop with it would wait for an answer."""
    raise ssl.SSLError("ssl_keyfile is encrypted; write it without a passphrase (openssl pkey -in OLD -out NEW)")


PartsT = TypeVar("PartsT")

_TLS_OPTIONS: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"})
_PLAIN_OPTIONS: Final = frozenset({"host", "port", "db", "username", "password", "path", "connection_class"})
_SENTINEL_OPTIONS: Final = frozenset({"sentinel_username", "sentinel_password"})
_NAMED_OPTIONS: Final = _TLS_OPTIONS | _PLAIN_OPTIONS | _SENTINEL_OPTIONS | URL_QUERY_ARGUMENT_PARSERS.keys()
_ESCAPES: Final = "in names and passwords write %2F for /, %3F for ?, %23 for #, %40 for @, %5B and %5D for brackets"
_SENTINEL_PORT: Final = 26379
_REDIS_PORT: Final = 6379


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server listens: host and port, or the path of a socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """How a connection begins."""

    username: str = ""
    password: str = field(default="", repr=False)
    db: int = 0
    tls: RedisTls | None = None

    def commands(self) -> list[bytes]:
        """What a connection says first. PING last, so that Redis has answered once before the connection is used."""
        commands: list[bytes] = []
        if self.password:
            names = [self.username.encode()] if self.username else []
            commands.append(pack(b"AUTH", *names, self.password.encode()))
        if self.db:
            commands.append(pack(b"SELECT", b"%d" % self.db))
        return [*commands, pack(b"PING")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    """What a URL says. `servers` are the one server, or Sentinels, or some members of a Cluster."""

    topology: str  # "single", "sentinel" or "cluster"
    servers: tuple[Server, ...]
    login: Login
    service: str = ""  # what the Sentinels call the master
    sentinel_login: Login | None = None


def parse_redis_url(url: str) -> RedisUrl:
    """Raises ValueError, which does not repeat the URL, and OSError for certificates that cannot be read."""
    scheme = url.partition("://")[0]
    base, _, topology = scheme.partition("+")
    if scheme in ("redis", "rediss", "unix"):
        return _parse_single(url)
    if base not in ("redis", "rediss") or topology not in ("sentinel", "cluster"):
        raise ValueError("the scheme must be redis, rediss, unix, redis+sentinel, rediss+sentinel or redis+cluster")
    rest = url.partition("://")[2]
    authority = rest[: next((at for at, one in enumerate(rest) if one in "/?#"), len(rest))]
    account, _, hosts = authority.rpartition("@")
    # Several hosts are none to urlsplit: some releases of Python refuse brackets that are not the first of them.
    parts = _split(urlsplit, f"{scheme}://{account}@hosts{rest[len(authority) :]}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    _refuse(options.keys() - _TLS_OPTIONS - (_SENTINEL_OPTIONS if topology == "sentinel" else frozenset()))
    tls = _tls(base, options)
    username, _, password = account.partition(":")
    names = [unquote(name) for name in parts.path.split("/") if name]
    db = 0
    if topology == "sentinel":
        if len(names) not in (1, 2):
            raise ValueError("redis+sentinel:// needs the path /service or /service/db")
        db = _number(names[1], "db") if len(names) == 2 else 0
    elif names:
        raise ValueError("redis+cluster:// takes no path: a Cluster has one database")
    return RedisUrl(
        topology=topology,
        servers=_servers(hosts, _SENTINEL_PORT if topology == "sentinel" else _REDIS_PORT),
        login=Login(username=unquote(username), password=unquote(password), db=db, tls=tls),
        service=names[0] if topology == "sentinel" else "",
        sentinel_login=Login(
            username=options.get("sentinel_username", ""), password=options.get("sentinel_password", ""), tls=tls
        ),
    )


def _parse_single(url: str) -> RedisUrl:
    options: dict[str, Any] = dict(_split(parse_url, url))
    _refuse(options.keys() - _PLAIN_OPTIONS - _TLS_OPTIONS)
    return RedisUrl(
        topology="single",
        servers=(Server(options.get("host", "localhost"), options.get("port", _REDIS_PORT), options.get("path", "")),),
        login=Login(
            username=options.get("username", ""),
            password=options.get("password", ""),
            db=options.get("db", 0),
            tls=_tls(url.partition("://")[0], options),
        ),
    )


def _split(split: Callable[[str], PartsT], url: str) -> PartsT:
    """Without what libraries say of a URL that they cannot take apart: that repeats it, and so parts of a password."""
    try:
        return split(url)
    except ValueError:
        raise ValueError(f"it cannot be taken apart; {_ESCAPES}") from None


def _refuse(options: Collection[str]) -> None:
    """Names are repeated only if they are those of options: a password with a ? in it looks like others."""
    named = sorted(set(options) & _NAMED_OPTIONS)
    if named:
        raise ValueError(f"options {', '.join(named)} are not supported")
    if options:
        raise ValueError(f"it has options that no Redis URL has; {_ESCAPES}")


def _servers(hosts: str, default_port: int) -> tuple[Server, ...]:
    found: list[Server] = []
    for each in hosts.split(","):
        host, port = each, ""
        if each.startswith("["):  # an IPv6 address
            host, _, port = each[1:].partition("]")
            port = port.removeprefix(":")
        elif ":" in each:
            host, _, port = each.partition(":")
        if not host:
            raise ValueError("a host is missing: write host:port,host:port")
        found.append(Server(unquote(host), _number(port, "port") if port else default_port))
    return tuple(found)


def _number(text: str, name: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{name} must be a number")
    return int(text)


def _tls(scheme: str, options: dict[str, Any]) -> RedisTls | None:
    """Raises ValueError for options without effect: they ask for TLS, and a password would be sent without it."""
    if scheme != "rediss":
        if pointless := sorted(options.keys() & _TLS_OPTIONS):
            raise ValueError(f"{', '.join(pointless)} without TLS: write rediss for redis in the scheme")
        return None

    def path(name: str) -> Path | None:
        return Path(options[name]) if options.get(name) else None

    if options.get("ssl_keyfile") and not options.get("ssl_certfile"):
        raise ValueError("ssl_keyfile without ssl_certfile: name the certificate of that key too")
    unchecked = str(options.get("ssl_check_hostname", "true")).lower() in ("false", "0", "no")
    return RedisTls(
        TlsOptions(
            ca_file=path("ssl_ca_certs"),
            cert_file=path("ssl_certfile"),
            key_file=path("ssl_keyfile"),
            check_hostname=not unchecked,
        )
    )
