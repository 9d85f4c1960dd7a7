"""TLS files of redis_url: taken up when they are renewed, told of once when they cannot be used; what errors say."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from kvpool.wire.tls_files import TlsFiles
from kvpool_index.adapters.redis_url import RedisTls, TlsOptions, explain_tls
from tests.fixtures.certificates import Authority, put


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def options(files: TlsFiles) -> TlsOptions:
    return TlsOptions(ca_file=files.ca_file, cert_file=files.cert_file, key_file=files.key_file)


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_a_passphrase(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "own", passphrase=b"secret")
    with pytest.raises(OSError, match="ssl_keyfile is encrypted; write it without a passphrase"):
        RedisTls(options(files))


def test_what_cannot_be_used_is_told_once_and_left(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.issue(tmp_path / "own")
    tls = RedisTls(options(files))
    good = tls.context()
    assert files.key_file is not None
    put(files.key_file, b"half a renewal")
    assert tls.context() is good is tls.context()
    files.key_file.unlink()
    assert tls.context() is good is tls.context()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert str(files.key_file) in caplog.messages[1]
    authority.issue(tmp_path / "own")
    assert tls.context() is not good


@pytest.mark.parametrize(
    ("said", "explained"),
    [
        ("certificate verify failed: certificate is not yet valid", "look at the clocks"),
        ("certificate verify failed: certificate has expired", "renew it"),
        ("certificate verify failed: unsuitable certificate purpose", "serverAuth"),
        ("certificate verify failed: unable to get local issuer certificate", "ssl_ca_certs"),
        ("certificate verify failed: IP address mismatch, certificate is not valid for '10.0.0.1'", "issue it anew"),
    ],
)
def test_a_refused_certificate_is_explained_by_what_is_wrong_with_it(said: str, explained: str) -> None:
    assert explained in explain_tls(ssl.SSLError(f"[SSL: CERTIFICATE_VERIFY_FAILED] {said} (_ssl.c:1006)"))
