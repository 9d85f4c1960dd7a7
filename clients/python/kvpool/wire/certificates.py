"""When certificates are valid: the two dates of X.509, read from PEM.

For telling people and metrics about a certificate. Whether one is to be trusted is decided by OpenSSL and gRPC alone.
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


@dataclass(frozen=True, slots=True)
class Validity:
    """Seconds since the epoch: from the first to the last second at which a certificate is valid."""

    not_before_s: int
    not_after_s: int


def certificate_validities(pem: str) -> Sequence[Validity]:
    """Of each certificate of a bundle, in its order. Raises ValueError if there is none, or for damage."""
    found = [_validity(ssl.PEM_cert_to_DER_cert(block)) for block in _PEM.findall(pem)]
    if not found:
        raise ValueError("there is no PEM certificate in it")
    return found


def _validity(der: bytes) -> Validity:
    """Certificate ::= {{[0] version, serialNumber, signature, issuer, {notBefore, notAfter}, ...}, ...} (RFC 5280)."""
    try:
        _, at, _ = _element(der, 0)
        _, at, _ = _element(der, at)
        tag, _, end = _element(der, at)
        if tag != _VERSION:  # left out by certificates of version 1
            end = at
        for _ in ("serialNumber", "signature", "issuer"):
            _, _, end = _element(der, end)
        tag, at, _ = _element(der, end)
        if tag != _SEQUENCE:
            raise ValueError("a certificate has no dates where they belong")
        first_tag, first, first_end = _element(der, at)
        last_tag, last, last_end = _element(der, first_end)
        return Validity(_time_s(first_tag, der[first:first_end]), _time_s(last_tag, der[last:last_end]))
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
