"""The demo touches no directory that is not its own."""

from pathlib import Path

import pytest

from demo.cluster import DemoCluster
from kvpool.core.errors import StartupFailed


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
