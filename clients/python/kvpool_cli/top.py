"""`kvpool top`: what a cluster does now, again and again, on a terminal; once, or as JSON, for programs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import queue
import shutil
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from kvpool.client.index import IndexClient
from kvpool.client.pagestore_control import ListedChunk, PageStoreControl
from kvpool.core.cluster import NodeKind
from kvpool.core.errors import DeadlineExceeded, KvPoolError, ServiceUnavailable
from kvpool_cli.output import EXIT_OK, CommandFailed, print_json, show
from kvpool_cli.targets import Target, add_target, find_target, on_pagestores, open_index, run
from kvpool_cli.top_metrics import fetch_all
from kvpool_cli.top_render import SORTS, render
from kvpool_cli.top_view import Look, NodeLook, View, view

_HOT_CHUNKS = 256  # asked of each pagestore
_HOT_TIMEOUT_S = 2.0


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool top`."""
    parser.description = (
        "Show again and again what the cluster does: tiers, bandwidth, hits, hosts, and the chains that are read most. "
        "Keys: q quits, s sorts by the next column, arrows and page keys scroll. Figures come from the index, from the "
        "nodes' /metrics as far as they can be reached from here, and from pagestores' lists of what is read."
    )
    add_target(parser)
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (default 2)")
    parser.add_argument(
        "--sort", choices=SORTS, default="state", help="order of hosts (default state: those in trouble first)"
    )
    parser.add_argument("--once", action="store_true", help="two looks, one print, no terminal needed")
    parser.add_argument("--json", action="store_true", help="with --once: a document for programs")
    parser.set_defaults(run=run_top)


def run_top(arguments: argparse.Namespace) -> int:
    """Show it until q is pressed. Raises CommandFailed where there is no terminal and --once was not given."""
    if not 0.2 <= arguments.interval <= 3600:
        raise CommandFailed(f"--interval must be 0.2 to 3600 seconds, got {arguments.interval:g}")
    target = find_target(arguments)
    if arguments.json and not arguments.once:
        raise CommandFailed("--json goes with --once; a program that wants more calls again")
    if arguments.once:
        seen = run(_once(target, arguments.interval))
        if arguments.json:
            print_json(to_document(seen))
        else:
            columns = shutil.get_terminal_size((100, 24)).columns
            lines = render(seen, columns=columns, lines=len(seen.hosts) + 60, sort=arguments.sort)
            show("\n".join(line.text.rstrip() for line in lines))
        return EXIT_OK
    if not sys.stdout.isatty() or not sys.stdin.isatty():
        raise CommandFailed("this is no terminal; give --once, or --once --json")
    from kvpool_cli import top_screen

    with Looking(target, arguments.interval) as looking:
        top_screen.show(looking.next, arguments.sort)
    return EXIT_OK


async def _once(target: Target, interval_s: float) -> View:
    async with open_index(target) as index:
        before = await look(target, index)
        await asyncio.sleep(interval_s)
        return view(before, await look(target, index))


async def look(target: Target, index: IndexClient) -> Look:
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
    return Look(
        at_s=time.monotonic(),
        index=target.index_endpoint,
        store=info.store,
        store_reachable=info.store_reachable,
        nodes=[
            NodeLook(node=node, samples=metrics[node.info.metrics_url], is_silent=node.info.node_id in silent)
            for node in nodes
        ],
        keyspaces={one.keyspace: one.name for one in keyspaces},
        hot=[(node.info.host_id, chunk) for node, got in hot if not isinstance(got, KvPoolError) for chunk in got],
    )


class Looking:
    """Looks in a thread of its own, so that keys are answered at once however slow a node is."""

    def __init__(self, target: Target, interval_s: float) -> None:
        self._target = target
        self._interval_s = interval_s
        self._views: queue.Queue[View | str] = queue.Queue(maxsize=1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)

    def __enter__(self) -> Looking:
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
            runner.run(self._look_on())

    def _end(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def _look_on(self) -> None:
        before: Look | None = None
        while True:
            try:
                async with open_index(self._target) as index:
                    while True:
                        now = await look(self._target, index)
                        self._tell(view(before or now, now))
                        before = now
                        await asyncio.sleep(self._interval_s)
            except (CommandFailed, KvPoolError) as error:
                self._tell(str(error))
                await asyncio.sleep(self._interval_s)

    def _tell(self, news: View | str) -> None:
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
