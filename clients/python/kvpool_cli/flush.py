"""`kvpool cache flush`: wait until every page is durable."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvpool.client.pagestore_control import FlushOutcome, PageStoreControl
from kvpool.core.errors import DeadlineExceeded, ServiceUnavailable
from kvpool_cli.answers import exit_code, nodes_document, nodes_table
from kvpool_cli.common import Common
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, CommandFailed, UsageFailed
from kvpool_cli.options import OneKeyspace, duration_option
from kvpool_cli.output import print_json, show
from kvpool_cli.targets import (
    Target,
    find_target,
    find_tls,
    on_every_pagestore,
    open_pagestore,
    run,
    said,
)


def flush(
    common: Common,
    keyspace: OneKeyspace = "",
    node: Annotated[
        str,
        typer.Option(
            "--node",
            metavar="NODE",
            help="Only this one: node id (its beginning), host id or endpoint; unix:PATH without asking the index.",
        ),
    ] = "",
    timeout: Annotated[float, duration_option("--timeout", "Give up then (default 60s).")] = 60.0,
) -> int:
    """Wait until every page is durable. Exit code 1 unless all pages became durable everywhere."""
    if node.startswith("unix:"):
        if keyspace:
            raise UsageFailed("--node unix:PATH flushes all keyspaces of one pagestore; leave --keyspace out")
        target = Target(index_endpoint="", state=None, tls=find_tls(common))
        return run(_flush_one(target, node, timeout, json=common.json))

    async def flush_one(control: PageStoreControl, keyspace_id: bytes) -> FlushOutcome:
        return await control.flush(keyspace_id, timeout_s=timeout)

    answers = run(on_every_pagestore(find_target(common), keyspace, flush_one, node))
    if common.json:
        none = FlushOutcome(page_count=0, failed_count=0)
        print_json({"version": 1, "nodes": nodes_document(answers, _counts, none)})
    else:
        show(nodes_table(answers, ["pages", "failed"], lambda done: [done.page_count, done.failed_count]))
    failed = any(isinstance(answer, FlushOutcome) and answer.failed_count for _, answer in answers)
    return EXIT_FAILED if failed else exit_code(answers)


def _counts(done: FlushOutcome) -> dict[str, Any]:
    return {"pages": done.page_count, "failed_pages": done.failed_count}


async def _flush_one(target: Target, endpoint: str, timeout_s: float, *, json: bool) -> int:
    try:
        async with open_pagestore(target, endpoint) as control:
            outcome = await control.flush(timeout_s=timeout_s)
    except (ServiceUnavailable, DeadlineExceeded) as error:
        raise CommandFailed(
            f"{endpoint} did not flush ({said(error)}); "
            "see that the pagestore runs and, if it does, give it more --timeout"
        ) from error
    if json:
        print_json({"version": 1, "nodes": [{"endpoint": endpoint, "error": ""} | _counts(outcome)]})
    else:
        show(f"{outcome.page_count} pages flushed, {outcome.failed_count} failed")
    return EXIT_FAILED if outcome.failed_count else EXIT_OK
