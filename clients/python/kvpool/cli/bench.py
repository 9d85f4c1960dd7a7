"""`kvpool bench`: how fast pages move and matches are answered, each figure beside its baseline of the same run."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from types import ModuleType

from kvpool.cli.bench_serve import options
from kvpool.cli.output import EXIT_OK, CommandFailed, say


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
    for bench, quick in ((pages, "20 s"), (match, "20 s")):
        bench.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
        bench.add_argument("--quick", action="store_true", help=f"less data and fewer rounds: under {quick}")
    _declare_serve(benches)


def _declare_serve(benches: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    serve = benches.add_parser(
        "serve", help="load on an OpenAI-compatible server: latencies, throughput, hits", allow_abbrev=False
    )
    options.declare(serve)
    serve.set_defaults(run=run_serve)
    report = benches.add_parser("serve-report", help="results of `serve` side by side, with plots", allow_abbrev=False)
    options.declare_report(report)
    report.set_defaults(run=run_serve_report)


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


def run_serve(arguments: argparse.Namespace) -> int:
    """Measure a server from outside, whatever runs there."""
    code: int = _serve_command().run_serve(arguments)
    return code


def run_serve_report(arguments: argparse.Namespace) -> int:
    """Show results of `serve`."""
    code: int = _serve_command().run_report(arguments)
    return code


def _serve_command() -> ModuleType:
    try:
        return import_module("kvpool.cli.bench_serve.command")
    except ModuleNotFoundError as error:
        raise CommandFailed(f"{error.name} is missing: pip install 'kvpool[bench]'") from error


def running_state_dir(arguments: argparse.Namespace) -> Path | None:
    """The state directory that was named on the command line, if any: measure there."""
    if not arguments.state_dir_given:
        return None
    say(f"measuring on the cluster of {arguments.state_dir}, whose pages compete with those of the bench")
    state_dir: Path = arguments.state_dir
    return state_dir
