"""What logs and metrics report of certificates: the dates and the kind of key of X.509, read from PEM.

Whether a certificate is to be trusted is decided by OpenSSL and gRPC alone.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18  # DER tags
# AlgorithmIdentifier of a public key begins with these object identifiers (RFC 3279, RFC 5480).
_RSA: Final = bytes.fromhex("06092a864886f70d010101")
_P256: Final = bytes.fromhex("06072a8648ce3d020106082a8648ce3d030107")
_P384: Final = bytes.fromhex("06072a8648ce3d020106052b81040022")


@dataclass(frozen=True, slots=True)
class Validity:
    """Seconds since the epoch: from the first to the last second at which a certificate is valid."""

    not_before_s: int
    not_after_s: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """Of one certificate. usable_key: it is of a kind that gRPC shakes hands with."""

    validity: Validity
    usable_key: bool


def read_certificates(pem: str) -> Sequence[Certificate]:
    """Of each certificate of a bundle, in its order. Raises ValueError if there is none, or for damage."""
    found = [_certificate(ssl.PEM_cert_to_DER_cert(block)) for block in _PEM.findall(pem)]
    if not found:
        raise ValueError("there is no PEM certificate in it")
    return found


def _certificate(der: bytes) -> Certificate:
    """RFC 5280: Certificate ::= {{[0] version, serialNumber, signature, issuer, {notBefore, notAfter}, subject,
    {{algorithm, parameters}, subjectPublicKey}, ...}, ...}."""
    try:
        _, at, _ = _element(der, 0)
        _, at, _ = _element(der, at)
        tag, _, end = _element(der, at)
        if tag != _VERSION:  # left out by certificates of version 1
            end = at
        for _ in ("serialNumber", "signature", "issuer"):
            _, _, end = _element(der, end)
        tag, at, end = _element(der, end)
        if tag != _SEQUENCE:
            raise ValueError("a certificate has no dates where they belong")
        first_tag, first, first_end = _element(der, at)
        last_tag, last, last_end = _element(der, first_end)
        _, _, end = _element(der, end)
        _, at, _ = _element(der, end)
        _, at, end = _element(der, at)
        return Certificate(
            Validity(_time_s(first_tag, der[first:first_end]), _time_s(last_tag, der[last:last_end])),
            der[at:end].startswith((_RSA, _P256, _P384)),
        )
    except IndexError:
        raise ValueError("a certificate is cut off") from None


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag of the DER element at `at`, and where its content begins and ends. Raises IndexError past the end."""
    tag, length = der[at], der[at + 1]
    start = at + 2
    if length & 0x80:
        size = length & 0x7F
        length = int.from_bytes(der[start : start + size], "big")
        start += size
    if start + length > len(der):
        raise IndexError
    return tag, start, start + length


def _time_s(tag: int, text: bytes) -> int:
    """UTCTime has two digits of the year, from 1950 to 2049; GeneralizedTime has four."""
    digits = text.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("20" if digits[:2] < "50" else "19") + digits
    elif tag != _GENERALIZED_TIME:
        raise ValueError("a certificate has a date of an unknown kind")
    return int(datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp())
