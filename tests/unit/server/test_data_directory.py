"""A node's data directory: one process at a time, and one node id for good."""

from pathlib import Path

import pytest

from kvpool.core.errors import StartupFailed
from kvpool_server.data_directory import DataDirectory


def test_it_has_one_process_at_a_time_and_keeps_its_node_id(tmp_path: Path) -> None:
    first = DataDirectory(tmp_path / "data", "agent")
    with pytest.raises(StartupFailed, match="in use by another agent; configure another"):
        DataDirectory(tmp_path / "data", "agent")
    first.close()
    second = DataDirectory(tmp_path / "data", "agent")
    assert second.node_id == first.node_id and len(first.node_id) == 16
    second.close()


@pytest.mark.parametrize(("content", "named"), [("no id", "holds no UUID"), (None, "cannot be read or written")])
def test_a_node_id_that_cannot_be_read_is_named(content: str | None, named: str, tmp_path: Path) -> None:
    path = tmp_path / "node-id"
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
    with pytest.raises(StartupFailed, match=f"{path} {named}"):
        DataDirectory(tmp_path, "pagestore")
