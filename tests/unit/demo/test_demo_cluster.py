"""The demo touches no directory that is not its own."""

from pathlib import Path

import pytest

from demo.cluster import DemoCluster
from kvpool.core.errors import StartupFailed


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /dev/shm."""
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setattr("demo.cluster.SHM_DIR", path)
    return path


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").touch()
    with pytest.raises(StartupFailed, match="--state-dir"):
        DemoCluster(tmp_path / "work")
    assert (tmp_path / "work" / "thesis.tex").exists()


def test_an_earlier_run_is_wiped(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    DemoCluster(directory).wipe()
    (directory / "pagestore-0").mkdir()
    (directory / "logs").mkdir()
    cluster = DemoCluster(directory)
    cluster.remove_data()
    assert not (directory / "pagestore-0").exists()
    assert (directory / "logs").exists()
    cluster.wipe()
    assert not (directory / "logs").exists()
    DemoCluster(directory)


def test_log_tails_name_their_process_and_stay_short(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    (directory / "logs").mkdir(parents=True)
    (directory / "made-by-kvpool-demo").touch()
    (directory / "logs" / "index-0.log").write_text("\n".join(f"line {number} {'x' * 900}" for number in range(30)))
    tails = DemoCluster(directory).log_tails(2).splitlines()
    assert [line[:16] for line in tails] == ["index-0: line 28", "index-0: line 29"]
    assert max(map(len, tails)) < 520


@pytest.mark.parametrize("roomy", [True, False])
def test_staging_memory_is_in_a_place_that_is_removed(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch, roomy: bool
) -> None:
    monkeypatch.setattr("demo.cluster.ARENA_BYTES", 1 if roomy else 1 << 60)
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(DemoCluster, "_kvpool", lambda _, *arguments, **__: commands.append(arguments))
    cluster = DemoCluster(tmp_path / "demo")
    cluster.wipe()
    cluster.up()
    cluster.up()
    (first, second) = (arguments[arguments.index("--shm-dir") + 1] for arguments in commands)
    assert first == second, "after a restart the old segments must be found again"
    assert Path(first).parent == (shared_memory if roomy else tmp_path / "demo")
    assert Path(first).stat().st_mode & 0o777 == 0o700
    cluster.down()
    cluster.remove_data()
    assert not Path(first).exists()
