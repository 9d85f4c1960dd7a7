"""Certificate, key and CA bundle as files, checked when they are read."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvpool.core.errors import InvalidRequest
from kvpool.wire.certificates import Validity, read_certificates

_READS_MAX: Final = 3  # of files that are replaced while they are read


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of one process: the CAs it trusts, and its own certificate and key."""

    ca_file: Path  # certificates of the authorities that peers' certificates must come from
    cert_file: Path | None = None  # own certificate chain, leaf first; as a client: only for servers that demand one
    key_file: Path | None = None  # private key of it, without a passphrase

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidRequest("tls_cert_file and tls_key_file belong together; set both or none")

    def named(self) -> Iterator[tuple[str, Path]]:
        """Name of the setting and path of each file there is."""
        yield "tls_ca_file", self.ca_file
        if self.cert_file is not None and self.key_file is not None:
            yield "tls_cert_file", self.cert_file
            yield "tls_key_file", self.key_file


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """What the files held at one moment. generation: counts from 1, one more for each change."""

    generation: int
    ca_pem: bytes
    cert_pem: bytes | None
    key_pem: bytes | None = field(repr=False)
    validity: Validity | None  # of the own certificate
    ca_validity: Validity  # of the authority that ends first


Version = tuple[tuple[int, ...], ...]
"""Of the files: device, inode, size and time of change of each."""


def files_version(files: TlsFiles) -> Version:
    """What changes when a file is written or replaced, or a link on its path is. Raises InvalidRequest."""
    found: list[tuple[int, ...]] = []
    for name, path in files.named():
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(name, path, error) from error
        found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def read_files(files: TlsFiles, generation: int) -> tuple[Version, TlsMaterial]:
    """All files, of one moment: certificate and key fit each other. Raises InvalidRequest saying what is wrong."""
    for _ in range(_READS_MAX):
        before = files_version(files)
        try:
            material = _read(files, generation)
        except InvalidRequest:
            if files_version(files) == before:
                raise
            continue  # half of them were already new
        if files_version(files) == before:
            return before, material
    raise InvalidRequest(f"{files.ca_file} and its neighbours change all the time; write them once")


def readable_by_others(path: Path) -> bool:
    """Whether every user of the host may read a file. A group may: orchestrators give secrets to the pod's group."""
    return bool(path.stat().st_mode & 0o007)


def _read(files: TlsFiles, generation: int) -> TlsMaterial:
    contents = {name: _content(name, path) for name, path in files.named()}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca_pem = contents["tls_ca_file"]
    try:
        authorities = read_certificates(ca_pem.decode("ascii", "replace"))
        context.load_verify_locations(cadata=ca_pem.decode("ascii", "replace"))
    except (ValueError, ssl.SSLError) as error:
        raise InvalidRequest(f"tls_ca_file {files.ca_file} cannot be used: {_cause(error)}") from error
    own: Validity | None = None
    if files.cert_file is not None and files.key_file is not None:
        own = _check_pair(context, files.cert_file, files.key_file, contents["tls_cert_file"])
    return TlsMaterial(
        generation=generation,
        ca_pem=ca_pem,
        cert_pem=contents.get("tls_cert_file"),
        key_pem=contents.get("tls_key_file"),
        validity=own,
        ca_validity=min((each.validity for each in authorities), key=lambda validity: validity.not_after_s),
    )


def _check_pair(context: ssl.SSLContext, cert_file: Path, key_file: Path, cert_pem: bytes) -> Validity:
    try:
        leaf = read_certificates(cert_pem.decode("ascii", "replace"))[0]
    except ValueError as error:
        raise InvalidRequest(f"tls_cert_file {cert_file} cannot be used: {error}") from error
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidRequest(
                f"the key in tls_key_file {key_file} is not that of the certificate in tls_cert_file {cert_file}; "
                f"install both files of one certificate"
            ) from error
        raise InvalidRequest(
            f"tls_cert_file {cert_file} and tls_key_file {key_file} cannot be used: {_cause(error)}"
        ) from error
    except (OSError, _EncryptedKey) as error:
        if isinstance(error, OSError):
            raise _unreadable("tls_key_file", key_file, error) from error
        raise InvalidRequest(
            f"tls_key_file {key_file} is encrypted; write it without a passphrase (openssl pkey -in OLD -out NEW)"
        ) from None
    if not leaf.usable_key:  # or every handshake would fail, with words about algorithms
        raise InvalidRequest(
            f"gRPC cannot use the key in tls_key_file {key_file}; make an RSA or ECDSA P-256 or P-384 one"
        )
    return leaf.validity


class _EncryptedKey(Exception):
    """A key asks for a passphrase."""


def _no_passphrase() -> str:
    raise _EncryptedKey  # or OpenSSL would ask on the terminal


def _content(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(name, path, error) from error


def _unreadable(name: str, path: Path, error: OSError) -> InvalidRequest:
    return InvalidRequest(f"{name} {path} cannot be read: {error.strerror or error}")


def _cause(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    if reason in ("NO_START_LINE", "NOT_ENOUGH_DATA", None) and isinstance(error, ssl.SSLError):
        return "it is not in PEM form"
    return str(reason or error)
