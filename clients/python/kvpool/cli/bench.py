"""`kvpool bench`: how fast pages move and matches are answered, each figure beside its baseline of the same run."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvpool.cli.output import EXIT_OK, say


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool bench`."""
    parser.description = (
        "Measure on a cluster of its own, started in a temporary directory; with --state-dir before `bench`, on the "
        "cluster that runs there. Every figure comes with a baseline that takes turns with it."
    )
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    pages = benches.add_parser("pages", help="put and get through the local arena, a remote stream, from disk")
    pages.set_defaults(run=run_pages)
    match = benches.add_parser("match", help="the longest prefix of 16 to 2048 chunks, on an open stream")
    match.set_defaults(run=run_match)
    for bench in (pages, match):
        bench.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
        bench.add_argument("--quick", action="store_true", help="less data and fewer rounds: under 20 s")


def run_pages(arguments: argparse.Namespace) -> int:
    """Measure pages."""
    from kvpool.cli.bench_pages import FULL, QUICK, measure_pages

    results = measure_pages(running_state_dir(arguments), QUICK if arguments.quick else FULL)
    print(results.render())
    if arguments.json:
        results.write(arguments.json)
    return EXIT_OK


def run_match(arguments: argparse.Namespace) -> int:
    """Measure matches."""
    from kvpool.cli.bench_match import FULL_REPETITIONS, QUICK_REPETITIONS, measure_matches

    results = measure_matches(running_state_dir(arguments), QUICK_REPETITIONS if arguments.quick else FULL_REPETITIONS)
    print(results.render())
    if arguments.json:
        results.write(arguments.json)
    return EXIT_OK


def running_state_dir(arguments: argparse.Namespace) -> Path | None:
    """The state directory that was named on the command line, if any: measure there."""
    if not arguments.state_dir_given:
        return None
    say(f"measuring on the cluster of {arguments.state_dir}, whose pages compete with those of the bench")
    state_dir: Path = arguments.state_dir
    return state_dir
