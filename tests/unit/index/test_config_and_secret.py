"""Configuration that makes no sense is refused by name, and secrets are taken whole."""

import pytest

from kvpool.core.keyspace import secret_from_file_content
from kvpool_index.config import IndexConfig
from kvpool_server.config import describe


@pytest.mark.parametrize(
    "bad",
    [
        {"lease_ttl_ms": 1},
        {"max_match_chunks": 0},
        {"max_match_questions": 0},
        {"event_streams": 0},
        {"tenant": ""},
        {"drain_s": -1.0},
    ],
)
def test_refused_by_name(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        IndexConfig(**bad)  # type: ignore[arg-type]


def test_intervals_leave_room_for_lost_renewals() -> None:
    config = IndexConfig(lease_ttl_ms=5000)
    assert config.renew_interval_ms * 3 <= 5000
    assert config.refresh_interval_s == 1.0
    assert IndexConfig(lease_ttl_ms=500).refresh_interval_s == pytest.approx(0.1)


def test_the_redis_url_is_not_shown() -> None:
    shown = describe(IndexConfig(redis_url="redis://user:hunter2@host:1/0"))
    assert "hunter2" not in str(shown) and "host" not in shown["redis_url"]


def test_secrets() -> None:
    assert secret_from_file_content(b"x" * 32) == b"x" * 32
    long = secret_from_file_content(b"x" * 33)
    assert len(long) == 32 and long != secret_from_file_content(b"x" * 34)
    for short in (b"", b"x" * 31):
        with pytest.raises(ValueError, match=f"{len(short)} bytes"):
            secret_from_file_content(short)
