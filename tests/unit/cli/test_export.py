"""`kvpool cache export` as a command: how it ends when it is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpool.client.index import OpenedKeyspace
from kvpool.core.cluster import NodeInfo, NodeKind
from kvpool.core.export_format import Manifest
from kvpool.core.grid import ShardGrid
from kvpool_cli import export
from kvpool_cli.export_source import PlannedChunk
from kvpool_cli.main import run_command as main
from tests.fixtures.patience import PATIENCE_S
from tests.unit.cli.exported import HASH_KEY, MANIFEST, SPEC, chunk_hash

NODE = NodeInfo(
    node_id=b"n" * 16, kind=NodeKind.PAGESTORE, host_id="h", endpoint="h:1", bulk_endpoint="h:2", incarnation=1
)


class HungNode:
    """A client of a node that answers nothing until the client is closed; somebody presses Ctrl-C meanwhile."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.ended = threading.Event()
        self.was_closed_in_time = False

    def read_pages(self, *_: object, timeout_s: float) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self.was_closed_in_time = self.closed.wait(PATIENCE_S)
        self.ended.set()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Who runs tests in the background of a script has them inherit that Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_an_export_though_a_node_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = HungNode()

    async def prepared(*_: object) -> tuple[Manifest, OpenedKeyspace, Sequence[PlannedChunk]]:
        opened = OpenedKeyspace(keyspace=MANIFEST.keyspace, hash_key=HASH_KEY, grid=ShardGrid.of(SPEC), created=False)
        return MANIFEST, opened, [PlannedChunk(chunk_hash(1), ((NODE, 1),), 1)]

    def open_transfer(*_: Any) -> HungNode:
        return node

    monkeypatch.setattr(export, "_prepare", prepared)
    monkeypatch.setattr(export, "open_transfer", open_transfer)
    path = tmp_path / "file.kvpx"
    assert main(["cache", "export", str(path), "--index", "127.0.0.1:1"]) == 1
    assert node.ended.wait(PATIENCE_S) and node.was_closed_in_time, (
        "what is read from the node must be ended, not waited for"
    )
    assert "interrupted" in capsys.readouterr().err
    assert not path.exists() and (tmp_path / "file.kvpx.partial").exists()
