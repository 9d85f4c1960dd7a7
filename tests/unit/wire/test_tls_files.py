"""Certificate files: their dates, and what is said of files that cannot be used."""

from __future__ import annotations

import asyncio
import logging
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
from kvpool.wire.certificates import Validity, read_certificates
from kvpool.wire.tls import TlsCredentials
from kvpool.wire.tls_files import TlsFiles, TlsMaterial, Version, read_files
from tests.fixtures.certificates import Authority, PrivateKey, not_after_s, put


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


def test_damage_is_told() -> None:
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
    async with asyncio.timeout(10):
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


def test_a_renewal_is_seen_at_the_next_look(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files)
    before = credentials.current()
    assert credentials.channel_credentials() == credentials.channel_credentials()
    authority.issue(tmp_path / "own", days=20)
    after = credentials.current()
    assert (before.generation, after.generation, credentials.channel_credentials()[0]) == (1, 2, 2)
    assert before.validity != after.validity
    assert credentials.current() is after


def test_a_renewal_behind_a_link_is_seen(authority: Authority, tmp_path: Path) -> None:
    """As orchestrators renew: files are links into a directory that is itself a link, which is swapped."""
    for name in ("first", "second"):
        authority.issue(tmp_path / name)
    (tmp_path / "data").symlink_to("first")
    for name in ("ca.crt", "tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"data/{name}")
    credentials = TlsCredentials(
        TlsFiles(ca_file=tmp_path / "ca.crt", cert_file=tmp_path / "tls.crt", key_file=tmp_path / "tls.key")
    )
    (tmp_path / "data.new").symlink_to("second")
    (tmp_path / "data.new").replace(tmp_path / "data")
    assert credentials.current().cert_pem == (tmp_path / "second" / "tls.crt").read_bytes()


def test_a_renewal_that_cannot_be_used_is_told_once_and_left(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files)
    good = credentials.current()
    assert files.key_file is not None
    put(files.key_file, b"half a renewal")
    assert credentials.current() is good is credentials.current()
    files.key_file.unlink()
    assert credentials.current() is good is credentials.current()
    assert credentials.reload_failure_count == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "tls_key_file" in caplog.text and "stay in use" in caplog.text
    authority.issue(tmp_path / "own")
    assert credentials.current().generation == 2


def test_the_rest_of_a_renewal_that_comes_while_its_half_is_refused_is_seen(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files)
    assert files.cert_file is not None and files.key_file is not None
    renewed = authority.issue(tmp_path / "renewed")
    assert renewed.cert_file is not None and renewed.key_file is not None
    put(files.cert_file, renewed.cert_file.read_bytes())
    key_pem = renewed.key_file.read_bytes()

    def read_then_write_the_rest(paths: TlsFiles, generation: int) -> tuple[Version, TlsMaterial]:
        monkeypatch.undo()
        try:
            return read_files(paths, generation)
        finally:
            put(tmp_path / "own" / "tls.key", key_pem)

    monkeypatch.setattr("kvpool.wire.tls.read_files", read_then_write_the_rest)
    credentials.current()
    assert credentials.current().key_pem == key_pem


def test_files_that_are_written_anew_with_the_same_content_are_no_renewal(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Or a copy of three files, of which one is new, would end the long streams of clients twice."""
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files)
    before = credentials.current()
    caplog.set_level(logging.INFO)
    for _, path in files.named():
        put(path, path.read_bytes())
        assert credentials.current() is before
    assert not caplog.records


def test_files_that_go_away_again_are_told_again(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files)
    good = credentials.current()
    for _ in range(2):
        files.ca_file.rename(tmp_path / "elsewhere")
        assert credentials.current() is good
        (tmp_path / "elsewhere").rename(files.ca_file)
        assert credentials.current() is good
    assert credentials.reload_failure_count == len(caplog.records) == 2


@pytest.mark.parametrize(("days_later", "words"), [(11, "expired on"), (-2, "is not valid before")])
def test_dates_that_have_passed_are_told_once(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, days_later: int, words: str
) -> None:
    now_s = datetime.now(UTC).timestamp()
    files = authority.issue(tmp_path / "own")
    credentials = TlsCredentials(files, now_s=lambda: now_s)
    assert not caplog.records
    now_s += days_later * 86400
    credentials.current()
    credentials.current()
    told = [record.getMessage() for record in caplog.records if str(files.cert_file) in record.getMessage()]
    assert len(told) == 1 and words in told[0] and "without a restart" in told[0]


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o604, True)])
def test_a_key_that_everybody_can_read_is_told(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    files = authority.issue(tmp_path / "own")
    assert files.key_file is not None
    files.key_file.chmod(mode)
    with caplog.at_level(logging.WARNING):
        TlsCredentials(files)
    assert ("chmod 600" in caplog.text) is warned


def test_a_client_without_a_key_cannot_serve(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "own")
    with pytest.raises(InvalidRequest, match="tls_cert_file and tls_key_file"):
        TlsCredentials(TlsFiles(ca_file=files.ca_file)).server_credentials(require_client_cert=False)
