"""`kvpool flush`: wait until every page is durable."""

from __future__ import annotations

import argparse

from kvpool.cli.output import EXIT_FAILED, EXIT_OK, CommandFailed, table
from kvpool.cli.targets import Target, add_target, find_target, find_tls, on_every_pagestore, open_pagestore, run, said
from kvpool.client.pagestore_control import FlushOutcome, PageStoreControl
from kvpool.core.errors import KvPoolError


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
    parser.set_defaults(run=run_flush)


def run_flush(arguments: argparse.Namespace) -> int:
    """Flush every pagestore; exit code 1 unless all pages became durable everywhere."""

    async def flush(control: PageStoreControl, keyspace: bytes) -> FlushOutcome:
        return await control.flush(keyspace, timeout_s=arguments.timeout)

    if arguments.pagestore:
        if arguments.keyspace:
            raise CommandFailed("--pagestore flushes all keyspaces of one pagestore; leave --keyspace out")
        target = Target(index_endpoint="", state=None, tls=find_tls(arguments))
        return run(_flush_one(target, arguments.pagestore, arguments.timeout))
    answers = run(on_every_pagestore(find_target(arguments), arguments.keyspace, flush))
    rows: list[list[object]] = []
    well = True
    for node, answer in answers:
        row: list[object] = [node.info.node_id.hex()[:8], node.info.host_id]
        if isinstance(answer, KvPoolError):
            well, row = False, [*row, "-", "-", said(answer)]
        else:
            well, row = well and not answer.failed_count, [*row, answer.page_count, answer.failed_count, ""]
        rows.append(row)
    print(table(["pagestore", "host", "pages", "failed", "error"], rows, right=[2, 3]))
    return EXIT_OK if well else EXIT_FAILED


async def _flush_one(target: Target, endpoint: str, timeout_s: float) -> int:
    async with open_pagestore(target, endpoint) as control:
        outcome = await control.flush(timeout_s=timeout_s)
    print(f"{outcome.page_count} pages flushed, {outcome.failed_count} failed")
    return EXIT_FAILED if outcome.failed_count else EXIT_OK
