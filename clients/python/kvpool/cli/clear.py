"""`kvpool clear`: drop the pages of a keyspace, or all."""

from __future__ import annotations

import argparse

from kvpool.cli.output import EXIT_FAILED, EXIT_OK, ask, print_json, show, table
from kvpool.cli.targets import add_target, describe, find_target, on_every_pagestore, run, said
from kvpool.client.pagestore_control import PageStoreControl
from kvpool.core.errors import KvPoolError

CLEAR_TIMEOUT_S = 60.0


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool clear`."""
    add_target(parser)
    parser.add_argument("--keyspace", default="", metavar="NAME", help="only this one (default: all)")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="a document for programs")
    parser.set_defaults(run=run_clear)


def run_clear(arguments: argparse.Namespace) -> int:
    """Clear every pagestore; exit code 1 unless all did it. A person at a terminal is asked first."""
    target = find_target(arguments)
    what = f"all pages of keyspace {arguments.keyspace}" if arguments.keyspace else "all pages of all keyspaces"
    ask(f"Drop {what} from every pagestore? Engines compute them again.", yes=arguments.yes)

    async def clear(control: PageStoreControl, keyspace: bytes) -> int:
        return await control.clear(keyspace, timeout_s=CLEAR_TIMEOUT_S)

    answers = run(on_every_pagestore(target, arguments.keyspace, clear))
    if arguments.json:
        nodes = [
            describe(node, answer) | {"pages": 0 if isinstance(answer, KvPoolError) else answer}
            for node, answer in answers
        ]
        print_json({"version": 1, "nodes": nodes})
        return EXIT_FAILED if any(node["error"] for node in nodes) else EXIT_OK
    rows = [
        [
            node.info.node_id.hex()[:8],
            node.info.host_id,
            *(["-", said(page_count)] if isinstance(page_count, KvPoolError) else [page_count, ""]),
        ]
        for node, page_count in answers
    ]
    show(table(["pagestore", "host", "pages", "error"], rows, right=[2]))
    return EXIT_FAILED if any(isinstance(answer, KvPoolError) for _, answer in answers) else EXIT_OK
