"""What may be said in a URL of Redis."""

import pytest

from kvpool_index.adapters.redis_url import RedisUrl, Server, parse_redis_url


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
