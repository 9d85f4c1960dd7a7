"""`make setup` refuses what it cannot serve, repairs what was left half made, and does nothing when nothing changed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import setup_venv
from tools.setup_venv import STAMP_NAME, SetupError, is_usable, is_whole, refuse_unsupported, set_up


@pytest.mark.parametrize(
    ("system", "machine", "version", "names"),
    [
        ("Darwin", "arm64", (3, 12), "Darwin arm64"),
        ("Linux", "ppc64le", (3, 12), "Linux ppc64le"),
        ("Linux", "x86_64", (3, 10), "3.10"),
        ("Linux", "aarch64", (3, 14), "3.14"),
    ],
)
def test_refuses_in_one_line(system: str, machine: str, version: tuple[int, int], names: str) -> None:
    with pytest.raises(SetupError) as caught:
        refuse_unsupported(system, machine, version)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("minor", [11, 12, 13])
def test_accepts_what_is_promised(machine: str, minor: int) -> None:
    refuse_unsupported("Linux", machine, (3, minor))


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replaces the steps that take minutes: an environment is a marker file, an install one line in this list."""
    done: list[str] = []

    def create(venv: Path) -> None:
        shutil.rmtree(venv, ignore_errors=True)
        venv.mkdir()
        (venv / "usable").touch()

    monkeypatch.setattr(setup_venv, "create", create)
    monkeypatch.setattr(setup_venv, "is_usable", lambda venv: (venv / "usable").exists())
    monkeypatch.setattr(setup_venv, "is_whole", lambda venv: not (venv / "debris").exists())
    monkeypatch.setattr(setup_venv, "install", lambda venv, torch_index_url: done.append(torch_index_url))
    yield done


def test_a_second_run_does_nothing(installs: list[str], tmp_path: Path) -> None:
    for _ in range(2):
        set_up(tmp_path / "venv", "")
    assert installs == [""]


def test_another_index_installs_again(installs: list[str], tmp_path: Path) -> None:
    for url in ("", "https://example.org/cpu", "https://example.org/cpu"):
        set_up(tmp_path / "venv", url)
    assert installs == ["", "https://example.org/cpu"]


def test_a_failed_install_is_taken_up_again(
    installs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv = tmp_path / "venv"
    set_up(venv, "")

    def fail(venv: Path, torch_index_url: str) -> None:
        raise SetupError("no network")

    with monkeypatch.context() as during:
        during.setattr(setup_venv, "install", fail)
        with pytest.raises(SetupError, match="no network"):
            set_up(venv, "https://example.org/cpu")
    assert not (venv / STAMP_NAME).exists()
    set_up(venv, "")  # what the old stamp said: it counts no more
    assert installs == ["", ""]


@pytest.mark.parametrize("broken", ["usable", STAMP_NAME])
def test_a_broken_environment_is_made_again(installs: list[str], tmp_path: Path, broken: str) -> None:
    venv = tmp_path / "venv"
    set_up(venv, "")
    (venv / broken).unlink()
    (venv / "debris").touch()
    set_up(venv, "")
    assert installs == ["", ""]
    assert not (venv / "debris").exists()


@pytest.mark.slow
def test_a_real_environment_is_usable_only_whole_and_where_it_was_made(tmp_path: Path) -> None:
    venv, moved = tmp_path / "venv", tmp_path / "moved"
    assert not is_usable(venv)
    setup_venv.create(venv)
    assert is_usable(venv)
    assert is_whole(venv)
    venv.rename(moved)
    assert not is_usable(moved)
    moved.rename(venv)
    package = next(venv.glob("lib/python*/site-packages/pip"))
    (package / "__pip-runner__.py").write_text("")
    assert not is_whole(venv)
    shutil.rmtree(package)
    assert not is_usable(venv)
