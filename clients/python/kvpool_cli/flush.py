"""`kvpool flush`: wait until every page is durable."""

from __future__ import annotations

import argparse
from typing import Any

from kvpool.client.pagestore_control import FlushOutcome, PageStoreControl
from kvpool.core.errors import KvPoolError
from kvpool_cli.output import EXIT_FAILED, EXIT_OK, CommandFailed, print_json, show, table
from kvpool_cli.targets import (
    Target,
    add_target,
    describe,
    find_target,
    find_tls,
    on_every_pagestore,
    open_pagestore,
    run,
)


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool flush`."""
    add_target(parser)
    parser.add_argument(
        "--pagestore",
        default="",
        metavar="ENDPOINT",
        help="only this one, host:port or unix:PATH; the index is not asked (default: all that live)",
    )
    parser.add_argument("--keyspace", default="", metavar="NAME", help="only this one (default: all)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="default 60")
    parser.add_argument("--json", action="store_true", help="a document for programs")
    parser.set_defaults(run=run_flush)


def run_flush(arguments: argparse.Namespace) -> int:
    """Flush every pagestore; exit code 1 unless all pages became durable everywhere."""

    async def flush(control: PageStoreControl, keyspace: bytes) -> FlushOutcome:
        return await control.flush(keyspace, timeout_s=arguments.timeout)

    if arguments.pagestore:
        if arguments.keyspace:
            raise CommandFailed("--pagestore flushes all keyspaces of one pagestore; leave --keyspace out")
        target = Target(index_endpoint="", state=None, tls=find_tls(arguments))
        return run(_flush_one(target, arguments.pagestore, arguments.timeout, json=arguments.json))
    answers = run(on_every_pagestore(find_target(arguments), arguments.keyspace, flush))
    nodes = [describe(node, answer) | _counts(answer) for node, answer in answers]
    if arguments.json:
        print_json({"version": 1, "nodes": nodes})
    else:
        rows = [
            [
                node["node_id"][:8],
                node["host_id"],
                *(["-", "-"] if node["error"] else [node["pages"], node["failed_pages"]]),
            ]
            for node in nodes
        ]
        with_errors = [[*row, node["error"]] for row, node in zip(rows, nodes, strict=True)]
        show(table(["pagestore", "host", "pages", "failed", "error"], with_errors, right=[2, 3]))
    return EXIT_FAILED if any(node["error"] or node["failed_pages"] for node in nodes) else EXIT_OK


def _counts(answer: FlushOutcome | KvPoolError) -> dict[str, Any]:
    done = answer if isinstance(answer, FlushOutcome) else FlushOutcome(page_count=0, failed_count=0)
    return {"pages": done.page_count, "failed_pages": done.failed_count}


async def _flush_one(target: Target, endpoint: str, timeout_s: float, *, json: bool) -> int:
    async with open_pagestore(target, endpoint) as control:
        outcome = await control.flush(timeout_s=timeout_s)
    if json:
        print_json({"version": 1, "nodes": [{"endpoint": endpoint, "error": ""} | _counts(outcome)]})
    else:
        show(f"{outcome.page_count} pages flushed, {outcome.failed_count} failed")
    return EXIT_FAILED if outcome.failed_count else EXIT_OK
