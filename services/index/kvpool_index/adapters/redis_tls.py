"""TLS to Redis, by files that may be renewed while the index runs."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

_log = logging.getLogger(__name__)

HINT_PLAIN: Final = "if that port expects TLS, write rediss:// for redis://"
HINT_TLS: Final = "if it demands a client certificate, name one of a CA that it trusts by ssl_certfile and ssl_keyfile"
"""For a connection that ends before Redis has answered once: which may also be because Redis ends."""

_EXPLANATIONS: Final = (
    ("SSL handshake is taking longer", "it does not speak TLS, or is too busy: if it has none, write redis://"),
    ("WRONG_VERSION_NUMBER", "it answers in the clear: write redis:// for rediss://, or name its TLS port"),
    ("record layer failure", "it answers in the clear: write redis:// for rediss://, or name its TLS port"),
    ("certificate has expired", "its certificate has expired: renew it"),
    ("certificate is not yet valid", "its certificate is not valid yet: look at the clocks of both hosts"),
    ("unsuitable certificate purpose", "its certificate is not for servers: issue it for serverAuth"),
    ("IP address mismatch", "its certificate does not name that address: issue it anew, or ssl_check_hostname=false"),
    ("Hostname mismatch", "its certificate does not name that host: issue it anew, or ssl_check_hostname=false"),
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
            self._state = state  # whatever comes of it: it is tried, and told of, once
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
