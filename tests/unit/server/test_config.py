"""Flags and environment variables come from the dataclass and from nowhere else."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated

import pytest

from kvpool.core.errors import StartupFailed
from kvpool_server.config import SECRET, describe, load_config


class Mode(Enum):
    FAST = "fast"
    SAFE = "safe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A service of the tests."""

    data_dir: Annotated[Path, "where pages live, 100% of them"]
    listen_port: Annotated[int, "TCP port"] = 7000
    capacity_bytes: Annotated[int, "page payload only"] = 64 << 30
    grace_s: float = 1.5
    compress: Annotated[bool, "shrink pages"] = False
    verify: bool = True
    peers: tuple[str, ...] = ()
    redis_url: Annotated[str | None, "index store"] = None
    mode: Mode = Mode.SAFE
    tags: tuple[str, ...] = field(default_factory=lambda: ("a", "b"))
    api_token: Annotated[str, "bearer token", SECRET] = "built-in-secret"
    key_number: Annotated[int, SECRET] = 0

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0:
            raise ValueError(f"capacity_bytes must be > 0, got {self.capacity_bytes}")


def load(*argv: str, **env: str) -> Config:
    return load_config(Config, prog="kvpool-test", env_prefix="KVPOOL_TEST", argv=argv, env=env)


def failure(*argv: str, **env: str) -> str:
    with pytest.raises(StartupFailed) as raised:
        load(*argv, **env)
    assert "\n" not in raised.value.message
    return raised.value.message


def test_defaults() -> None:
    assert load("--data-dir", "/d") == Config(data_dir=Path("/d"))


def test_every_type_from_flags() -> None:
    argv = "--data-dir /d --listen-port 0 --capacity-bytes 1.5GiB --grace-s 2 --compress --no-verify --peers a:1,b:2"
    config = load(*argv.split(), "--redis-url", "redis://r", "--mode", "fast", "--tags", "")
    assert config == Config(
        data_dir=Path("/d"),
        listen_port=0,
        capacity_bytes=3 << 29,
        grace_s=2.0,
        compress=True,
        verify=False,
        peers=("a:1", "b:2"),
        redis_url="redis://r",
        mode=Mode.FAST,
        tags=(),
    )


def test_every_type_from_the_environment() -> None:
    config = load(
        KVPOOL_TEST_DATA_DIR="/d",
        KVPOOL_TEST_CAPACITY_BYTES="512 MiB",
        KVPOOL_TEST_VERIFY="off",
        KVPOOL_TEST_COMPRESS="TRUE",
        KVPOOL_TEST_PEERS=" a , b,",
        KVPOOL_TEST_MODE="fast",
        KVPOOL_TEST_API_TOKEN="t",
    )
    assert config == Config(
        data_dir=Path("/d"),
        capacity_bytes=512 << 20,
        verify=False,
        compress=True,
        peers=("a", "b"),
        mode=Mode.FAST,
        api_token="t",
    )


def test_flag_beats_environment_beats_default() -> None:
    env = {"KVPOOL_TEST_LISTEN_PORT": "2", "KVPOOL_TEST_VERIFY": "false"}
    assert load("--data-dir", "/d", **env).listen_port == 2
    config = load("--data-dir", "/d", "--listen-port", "3", "--verify", **env)
    assert (config.listen_port, config.verify) == (3, True)


def test_empty_variable_counts_as_unset_and_empty_flag_as_given() -> None:
    assert load("--data-dir", "/d", KVPOOL_TEST_LISTEN_PORT="").listen_port == 7000
    assert load("--data-dir", "/d", "--redis-url", "", KVPOOL_TEST_REDIS_URL="redis://r").redis_url is None


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--listen-port", "http"], ["--listen-port", "KVPOOL_TEST_LISTEN_PORT", "whole number", "'http'"]),
        (["--capacity-bytes", "5 apples"], ["--capacity-bytes", "512MiB", "'5 apples'"]),
        (["--capacity-bytes", "0.3"], ["whole number of bytes"]),
        (["--grace-s", "nan"], ["--grace-s", "finite"]),
        (["--mode", "slow"], ["--mode", "fast, safe"]),
        (["--capacity-bytes", "0"], ["capacity_bytes must be > 0"]),
        (["--no-such-flag"], ["--no-such-flag", "--help"]),
        (["--listen", "5"], ["--listen"]),  # no abbreviations: they break when a flag is added
        (["--api-token", "t"], ["--api-token"]),  # secrets have no flag
    ],
)
def test_mistakes_are_one_clear_line(argv: list[str], parts: list[str]) -> None:
    message = failure("--data-dir", "/d", *argv)
    assert all(part in message for part in parts), message


def test_missing_required_value_names_flag_and_variable() -> None:
    assert "--data-dir (env KVPOOL_TEST_DATA_DIR)" in failure()


def test_secrets_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hunter2" not in failure("--data-dir", "/d", KVPOOL_TEST_KEY_NUMBER="hunter2")
    config = load("--data-dir", "/d", "--redis-url", "redis://u:hunter2@r:1/0", KVPOOL_TEST_API_TOKEN="hunter2")
    shown = describe(config)
    assert "hunter2" not in str(shown)
    assert shown["redis_url"] == "redis://u:***@r:1/0"
    assert shown["capacity_bytes"] == "64GiB"
    with pytest.raises(SystemExit) as ended:
        load("--help")
    assert ended.value.code == 0
    assert "built-in-secret" not in capsys.readouterr().out


def test_help_shows_variables_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "100% of them [env KVPOOL_TEST_DATA_DIR; required]" in text
    assert "page payload only [env KVPOOL_TEST_CAPACITY_BYTES; default: 64GiB]" in text
    assert "off with --no-compress [env KVPOOL_TEST_COMPRESS; default: false]" in text
    assert "index store [env KVPOOL_TEST_REDIS_URL; default: unset]" in text
    assert "KVPOOL_TEST_API_TOKEN bearer token" in text


def test_unsupported_type_is_the_authors_mistake() -> None:
    @dataclass
    class Odd:
        table: dict[str, str] = field(default_factory=dict)

    with pytest.raises(TypeError, match="table"):
        load_config(Odd, prog="p", env_prefix="P", argv=[], env={})
