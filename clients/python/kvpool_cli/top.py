"""`kvpool top`: what a cluster does now, again and again, on a terminal; once, or as JSON, for programs."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import shutil
import sys
import threading
import time
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer

from kvpool.client.index import IndexClient
from kvpool.client.pagestore_control import ListedChunk, PageStoreControl
from kvpool.core.cluster import NodeKind
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable
from kvpool_cli import top_screen
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_OK, CommandFailed, UsageFailed
from kvpool_cli.options import duration_option
from kvpool_cli.output import print_json, show
from kvpool_cli.targets import Target, find_target, on_pagestores, open_index, run
from kvpool_cli.top_metrics import fetch_all
from kvpool_cli.top_render import SORTS, render
from kvpool_cli.top_view import ClusterSnapshot, NodeSnapshot, View, view

_HOT_CHUNKS = 256  # asked of each pagestore
_HOT_TIMEOUT_S = 2.0


class Sort(StrEnum):
    """Orders of hosts."""

    STATE, NAME, READ, WRITE, STAGING, EVICTED = SORTS


def top(
    common: Common,
    interval: Annotated[float, duration_option("--interval", "Between two looks (default 2s).")] = 2.0,
    sort: Annotated[Sort, typer.Option(help="Order of hosts; state: those in trouble first.")] = Sort.STATE,
    once: Annotated[bool, typer.Option("--once", help="Two looks, one print, no terminal needed.")] = False,
) -> int:
    """Show continuously what the cluster does: tiers, bandwidth, hits, hosts, hot chains.

    Keys: q quits, s sorts by the next column, arrows and page keys scroll. Figures come from the index, from the
    nodes' /metrics as far as they can be reached from here, and from pagestores' lists of what is read.
    """
    if not 0.2 <= interval <= 3600:
        raise UsageFailed(f"--interval must be 200ms to 1h, got {interval:g}s")
    if common.json and not once:
        raise UsageFailed("--json goes with --once; a program that wants more calls again")
    target = find_target(common)
    if once:
        seen = run(_once(target, interval))
        if common.json:
            print_json(to_document(seen))
        else:
            columns = shutil.get_terminal_size((100, 24)).columns
            show(render(seen, columns=columns, lines=len(seen.hosts) + 60, sort=sort))
        return EXIT_OK
    if not sys.stdout.isatty() or not sys.stdin.isatty():
        raise UsageFailed("this is not a terminal; give --once, or --once --json")
    with SnapshotThread(target, interval) as snapshots:
        top_screen.show(snapshots.next, sort)
    return EXIT_OK


async def _once(target: Target, interval_s: float) -> View:
    async with open_index(target) as index:
        before = await snapshot(target, index)
        await asyncio.sleep(interval_s)
        return view(before, await snapshot(target, index))


async def snapshot(target: Target, index: IndexClient) -> ClusterSnapshot:
    """All that is asked for one frame. Raises what the index answers."""
    info = await index.get_info()
    nodes = await index.list_nodes() if info.store_reachable else []
    keyspaces = await index.list_keyspaces() if info.store_reachable else []
    pagestores = [node for node in nodes if node.info.kind is NodeKind.PAGESTORE]

    async def most_read(control: PageStoreControl) -> list[ListedChunk]:
        return [chunk async for chunk in control.list_chunks(most_read=_HOT_CHUNKS, timeout_s=_HOT_TIMEOUT_S)]

    metrics, hot = await asyncio.gather(
        fetch_all([node.info.metrics_url for node in nodes]), on_pagestores(target, pagestores, most_read)
    )
    silent = {node.info.node_id for node, got in hot if isinstance(got, ServiceUnavailable | DeadlineExceeded)}
    return ClusterSnapshot(
        at_s=time.monotonic(),
        index=target.index_endpoint,
        store=info.store,
        store_reachable=info.store_reachable,
        nodes=[
            NodeSnapshot(node=node, samples=metrics[node.info.metrics_url], is_silent=node.info.node_id in silent)
            for node in nodes
        ],
        keyspaces={one.keyspace: one.name for one in keyspaces},
        hot=[(node.info.host_id, chunk) for node, got in hot if not isinstance(got, KvPoolError) for chunk in got],
    )


class SnapshotThread:
    """Takes snapshots in a thread of its own, so that keys are answered at once however slow a node is."""

    def __init__(self, target: Target, interval_s: float) -> None:
        self._target = target
        self._interval_s = interval_s
        self._views: queue.Queue[View | str] = queue.Queue(maxsize=1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)

    def __enter__(self) -> SnapshotThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join()  # a node that does not answer holds it up for no longer than a look may take

    def next(self, timeout_s: float) -> View | str | None:
        """The next view, or why there is none; None if there is nothing new yet."""
        try:
            return self._views.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, contextlib.suppress(asyncio.CancelledError):
            runner.run(self._take_snapshots())

    def _end(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def _take_snapshots(self) -> None:
        before: ClusterSnapshot | None = None
        while True:
            try:
                async with open_index(self._target) as index:
                    while True:
                        now = await snapshot(self._target, index)
                        self._publish(view(before or now, now))
                        before = now
                        await asyncio.sleep(self._interval_s)
            except (CommandFailed, KvPoolError) as error:
                self._publish(str(error))
                await asyncio.sleep(self._interval_s)

    def _publish(self, news: View | str) -> None:
        """Replace what was not shown yet."""
        while True:
            try:
                self._views.put_nowait(news)
                return
            except queue.Full:
                self.next(0)


def to_document(seen: View) -> dict[str, Any]:
    """The document of `--once --json`: rates are per second."""
    document = asdict(seen)
    document["total"]["hit_share"] = seen.total.hit_share
    return {"version": 1, **document}
