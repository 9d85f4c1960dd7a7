"""Benches by name: `python -m bench COMMAND`, run from a source checkout. bench/README.md lists all others.

`pages` and `match` measure a cluster of their own in a temporary directory, or with --state-dir one that runs; every
figure comes with a baseline that takes turns with it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import eviction_replay, replay_live
from bench.match import FULL_REPETITIONS, QUICK_REPETITIONS, measure_matches
from bench.pages import FULL, QUICK, measure_pages
from bench.rig.results import Results
from bench.serve import command, options
from kvpool.core.errors import KvPoolError, StartupFailed
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, CommandFailed
from kvpool_cli.output import fail, say


def build_parser() -> argparse.ArgumentParser:
    """All commands."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    benches = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return benches.add_parser(name, help=text, allow_abbrev=False)

    pages = add("pages", "put and get through the local arena, a remote stream, from disk")
    pages.set_defaults(run=run_pages)
    match = add("match", "the longest prefix of 16 to 2048 chunks, on an open stream")
    match.set_defaults(run=run_match)
    for bench in (pages, match):
        bench.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
        bench.add_argument("--quick", action="store_true", help="less data and fewer rounds: under 20 s")
        bench.add_argument("--state-dir", type=Path, help="measure the cluster that runs there")
    serve = add("serve", "load on an OpenAI-compatible server: latencies, throughput, hits")
    options.declare(serve)
    serve.set_defaults(run=command.run_serve)
    report = add("serve-report", "results of `serve` side by side, with plots")
    options.declare_report(report)
    report.set_defaults(run=command.run_report)
    replay = add("replay", "hit rate of a trace of requests, by eviction policy and capacity")
    eviction_replay.declare(replay)
    replay.set_defaults(run=eviction_replay.run)
    live = add("replay-live", "a trace with real pages at a cluster that runs on this machine")
    replay_live.declare(live)
    live.set_defaults(run=replay_live.run)
    return parser


def run_pages(arguments: argparse.Namespace) -> int:
    """Measure pages."""
    _warn_shared(arguments.state_dir)
    return _finish(measure_pages(arguments.state_dir, QUICK if arguments.quick else FULL), arguments.json)


def run_match(arguments: argparse.Namespace) -> int:
    """Measure matches."""
    _warn_shared(arguments.state_dir)
    repetitions = QUICK_REPETITIONS if arguments.quick else FULL_REPETITIONS
    return _finish(measure_matches(arguments.state_dir, repetitions), arguments.json)


def _warn_shared(state_dir: Path | None) -> None:
    if state_dir is not None:
        say(f"measuring on the cluster of {state_dir}, whose pages compete with those of the bench")


def _finish(results: Results, path: Path | None) -> int:
    print(results.render())
    if path:
        results.write(path)
    return EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run one bench; its exit code: 0 done, 1 failed, 2 not understood or could not start."""
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = build_parser().parse_args(argv)
    arguments.argv = argv
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except StartupFailed as error:
        return fail(error, code=EXIT_USAGE)
    except (CommandFailed, KvPoolError) as error:
        return fail(error)
    except KeyboardInterrupt:
        return EXIT_FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
