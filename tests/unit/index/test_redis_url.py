"""What may be said in a URL of Redis."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

import pytest

from kvpool.wire.tls_files import TlsFiles
from kvpool_index.adapters.redis_url import RedisTls, RedisUrl, Server, TlsOptions, explain_tls, parse_redis_url
from tests.fixtures.certificates import Authority, put


@pytest.mark.parametrize(
    ("url", "topology", "servers", "service", "db"),
    [
        ("redis://h:1/3", "single", (Server("h", 1),), "", 3),
        ("redis://", "single", (Server("localhost", 6379),), "", 0),
        ("unix:///run/redis.sock", "single", (Server("localhost", 6379, "/run/redis.sock"),), "", 0),
        ("redis+sentinel://a:1,b:2/kv", "sentinel", (Server("a", 1), Server("b", 2)), "kv", 0),
        ("redis+sentinel://a,[::1]:7/kv/2", "sentinel", (Server("a", 26379), Server("::1", 7)), "kv", 2),
        ("redis+cluster://a:1,b", "cluster", (Server("a", 1), Server("b", 6379)), "", 0),
        ("redis+cluster://[::1]/", "cluster", (Server("::1", 6379),), "", 0),
    ],
)
def test_forms(url: str, topology: str, servers: tuple[Server, ...], service: str, db: int) -> None:
    parsed = parse_redis_url(url)
    assert (parsed.topology, parsed.servers, parsed.service, parsed.login.db) == (topology, servers, service, db)
    assert parsed.login.tls is None


def login(parsed: RedisUrl) -> tuple[str, str]:
    return parsed.login.username, parsed.login.password


@pytest.mark.parametrize("host", ["redis://{}h:1", "redis+sentinel://{}h:1/kv", "redis+cluster://{}h:1,i:2"])
def test_passwords(host: str) -> None:
    assert login(parse_redis_url(host.format(""))) == ("", "")
    assert login(parse_redis_url(host.format(":p%40%2Cw@"))) == ("", "p@,w")
    assert login(parse_redis_url(host.format("me:secret@"))) == ("me", "secret")


def test_what_a_url_says_shows_no_password() -> None:
    shown = repr(parse_redis_url("redis+sentinel://:data@a:1/kv?sentinel_password=other"))
    assert "data" not in shown and "other" not in shown


def test_sentinels_have_a_login_of_their_own() -> None:
    parsed = parse_redis_url("redis+sentinel://:data@a:1/kv?sentinel_username=u&sentinel_password=p")
    assert parsed.sentinel_login is not None
    assert (parsed.sentinel_login.username, parsed.sentinel_login.password, parsed.login.password) == ("u", "p", "data")
    assert parse_redis_url("redis://:data@a:1").sentinel_login is None


@pytest.mark.parametrize("url", ["rediss://h:1", "rediss+sentinel://h:1/kv", "rediss+cluster://h:1"])
def test_tls(url: str) -> None:
    parsed = parse_redis_url(url)
    assert parsed.login.tls is not None and parsed.login.tls.context().check_hostname
    if parsed.sentinel_login is not None:
        assert parsed.sentinel_login.tls is parsed.login.tls
    unchecked = parse_redis_url(f"{url}?ssl_check_hostname=false").login.tls
    assert unchecked is not None and not unchecked.context().check_hostname


@pytest.mark.parametrize(
    ("url", "cause"),
    [
        ("http://h", "scheme"),
        ("redis://:p@h?ssl_ca_certs=/ca", "ssl_ca_certs without TLS: write rediss for redis"),
        ("redis+cluster://h?ssl_certfile=/c&ssl_keyfile=/k", "ssl_certfile, ssl_keyfile without TLS"),
        ("rediss://h?ssl_keyfile=/k", "ssl_keyfile without ssl_certfile"),
        ("http+cluster://h", "scheme"),
        ("redis+ring://h", "scheme"),
        ("redis+sentinel://h:1", "/service"),
        ("redis+sentinel://h:1/kv/x", "db must be a number"),
        ("redis+sentinel://h:1/kv/1/2", "/service"),
        ("redis+sentinel://,h/kv", "host is missing"),
        ("redis+cluster://", "host is missing"),
        ("redis+cluster://h:1/3", "one database"),
        ("redis+cluster://h:port", "port must be a number"),
        ("redis+cluster://h?sentinel_password=secret", "sentinel_password"),
        ("redis+cluster://h?db=secret", "db are not supported"),
    ],
)
def test_what_is_refused(url: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause) as caught:
        parse_redis_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+sentinel", "redis+cluster"])
@pytest.mark.parametrize("account", [":secret/x", ":se?secret=1", ":se?secret", "u:secret#x", ":[secret]", ":x[secret"])
def test_a_password_that_is_not_written_as_it_should_be_is_not_repeated(scheme: str, account: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_redis_url(f"{scheme}://{account}@h:6379/kv")
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def options(files: TlsFiles) -> TlsOptions:
    return TlsOptions(ca_file=files.ca_file, cert_file=files.cert_file, key_file=files.key_file)


def test_an_encrypted_key_is_refused_without_a_prompt_for_a_passphrase(authority: Authority, tmp_path: Path) -> None:
    files = authority.issue(tmp_path / "own", passphrase=b"secret")
    with pytest.raises(OSError, match="ssl_keyfile is encrypted; write it without a passphrase"):
        RedisTls(options(files))


def test_what_cannot_be_used_is_reported_once_and_left(
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
        ("certificate verify failed: IP address mismatch, certificate is not valid for '10.0.0.1'", "issue another"),
    ],
)
def test_a_refused_certificate_is_explained_by_what_is_wrong_with_it(said: str, explained: str) -> None:
    assert explained in explain_tls(ssl.SSLError(f"[SSL: CERTIFICATE_VERIFY_FAILED] {said} (_ssl.c:1006)"))
