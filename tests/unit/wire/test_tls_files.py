"""Certificate files: their dates, and what is said of files that cannot be used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from kvpool.core.errors import InvalidRequest
from kvpool.wire import tls_files
from kvpool.wire.certificates import Validity, read_certificates
from kvpool.wire.tls import TlsCredentials
from kvpool.wire.tls_files import TlsFiles, read_files
from tests.fixtures.certificates import Authority, PrivateKey, not_after_s, put
from tests.fixtures.patience import PATIENCE_S


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def dated(start: datetime, end: datetime) -> str:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x" * 60)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (datetime(1950, 1, 1, tzinfo=UTC), datetime(1999, 12, 31, 23, 59, 59, tzinfo=UTC)),
        (datetime(2026, 2, 28, 1, 2, 3, tzinfo=UTC), datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC)),
        (datetime(2050, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),
    ],
)
def test_dates_are_those_of_the_certificate(start: datetime, end: datetime) -> None:
    bundle = f"a comment\n{dated(start, end)}{dated(start, end)}"
    dates = Validity(int(start.timestamp()), int(end.timestamp()))
    assert [each.validity for each in read_certificates(bundle)] == [dates] * 2


def test_damage_is_reported() -> None:
    lines = dated(datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)).splitlines()
    with pytest.raises(ValueError):
        read_certificates("\n".join([*lines[:2], lines[-1]]))
    with pytest.raises(ValueError, match="no PEM certificate"):
        read_certificates("no certificate")


KEYS: dict[str, tuple[Callable[[], PrivateKey], bool]] = {
    "P-256": (lambda: ec.generate_private_key(ec.SECP256R1()), True),
    "P-384": (lambda: ec.generate_private_key(ec.SECP384R1()), True),
    "RSA": (lambda: rsa.generate_private_key(65537, 2048), True),
    "P-521": (lambda: ec.generate_private_key(ec.SECP521R1()), False),
    "Ed25519": (ed25519.Ed25519PrivateKey.generate, False),
}


@pytest.mark.parametrize("kind", KEYS)
async def test_keys_that_grpc_cannot_use_are_refused(authority: Authority, tmp_path: Path, kind: str) -> None:
    new_key, usable = KEYS[kind]
    files = authority.issue(tmp_path / "own", key=new_key())
    if not usable:
        with pytest.raises(InvalidRequest, match="gRPC cannot use the key"):
            TlsCredentials(files)
        return
    credentials = TlsCredentials(files)
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", credentials.server_credentials(require_client_cert=True))
    await server.start()
    channel = grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials.channel_credentials()[1])
    async with asyncio.timeout(PATIENCE_S):
        await channel.channel_ready()
    await channel.close()
    await server.stop(0)


def test_files_are_read_with_their_dates(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "own")
    assert files.cert_file is not None and files.key_file is not None
    _, material = read_files(files, 7)
    assert (material.generation, material.key_pem) == (7, files.key_file.read_bytes())
    assert material.validity is not None
    assert material.validity.not_after_s == not_after_s(files.cert_file.read_bytes())
    assert material.ca_validity.not_after_s == not_after_s(authority.pem)
    assert "PRIVATE" not in repr(material)


def test_the_authority_that_ends_first_counts(authority: Authority, tmp_path: Path) -> None:
    short = Authority("short", days=2)
    files = authority.issue(tmp_path / "own", trusted=authority.pem + short.pem)
    assert read_files(files, 1)[1].ca_validity.not_after_s == not_after_s(short.pem)


def test_files_that_are_replaced_between_two_reads_are_read_again(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the key of one certificate would be shown with another."""
    files = authority.issue(tmp_path / "own")
    content_of = tls_files._content

    def read_then_renew(name: str, path: Path) -> bytes:
        content = content_of(name, path)
        if name == "tls_cert_file":
            monkeypatch.undo()
            authority.issue(tmp_path / "own")
        return content

    monkeypatch.setattr(tls_files, "_content", read_then_renew)
    _, material = read_files(files, 1)
    assert files.cert_file is not None and material.cert_pem == files.cert_file.read_bytes()


def test_half_a_renewal_whose_rest_comes_while_it_is_read_is_no_failure(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = authority.issue(tmp_path / "own")
    assert files.key_file is not None
    good = files.key_file.read_bytes()
    put(files.key_file, b"half")
    content_of = tls_files._content

    def read_then_write_the_rest(name: str, path: Path) -> bytes:
        content = content_of(name, path)
        if name == "tls_ca_file":
            monkeypatch.undo()
            put(tmp_path / "own" / "tls.key", good)
            raise InvalidRequest("half of it was written")
        return content

    monkeypatch.setattr(tls_files, "_content", read_then_write_the_rest)
    assert read_files(files, 1)[1].key_pem == good


def test_files_that_are_never_at_rest_are_given_up(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = authority.issue(tmp_path / "own")
    content_of = tls_files._content

    def read_and_touch(name: str, path: Path) -> bytes:
        content = content_of(name, path)
        put(path, content)
        return content

    monkeypatch.setattr(tls_files, "_content", read_and_touch)
    with pytest.raises(InvalidRequest, match="change all the time"):
        read_files(files, 1)


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="belong together"):
        TlsFiles(ca_file=tmp_path / "ca", cert_file=tmp_path / "cert")


@pytest.mark.parametrize(
    ("file", "content", "cause"),
    [
        ("ca.crt", None, "tls_ca_file .* cannot be read: No such file"),
        ("ca.crt", b"", "tls_ca_file .* cannot be used: there is no PEM certificate in it"),
        ("tls.crt", b"nonsense", "tls_cert_file .* cannot be used: there is no PEM certificate in it"),
        ("tls.key", None, "tls_key_file .* cannot be read: No such file"),
        ("tls.key", b"nonsense", "tls_key_file .* cannot be used: it is not in PEM form"),
        ("tls.key", "other", "is not that of the certificate"),
        ("tls.key", "encrypted", "is encrypted; write it without a passphrase"),
    ],
)
def test_what_cannot_be_used_is_named(
    authority: Authority, tmp_path: Path, file: str, content: bytes | str | None, cause: str
) -> None:
    files = authority.issue(tmp_path / "own")
    path = tmp_path / "own" / file
    if content is None:
        path.unlink()
    elif isinstance(content, str):
        other = authority.issue(tmp_path / "other", passphrase=b"secret" if content == "encrypted" else b"")
        assert other.key_file is not None and other.cert_file is not None
        put(path, other.key_file.read_bytes())
        if content == "encrypted":
            put(tmp_path / "own" / "tls.crt", other.cert_file.read_bytes())
    else:
        put(path, content)
    with pytest.raises(InvalidRequest, match=cause):
        TlsCredentials(files)
