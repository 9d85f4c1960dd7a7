"""`docker compose run --rm demo`: engines that share prefixes through a cluster that runs already.

Phases, each in an engine process of its own that replays the same conversations:
  cold       the first engine, on the first agent; after an earlier run it finds what that one left
  shared     another engine, on the last agent, with what the first one left
  reference  transformers without kvpool
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from demo.device import CHOICES, pick_device
from demo.progress import Progress
from demo.report import DemoReport
from demo.run import EXIT_FAILED, EXIT_USAGE, EngineFailed, Engines, interrupt
from demo.workload import load_workload
from kvpool.core.errors import KvPoolError

PHASE_COUNT = 3


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """--agent is given once for each agent."""
    workload = load_workload()
    parser = argparse.ArgumentParser(
        prog="demo.composed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agent", action="append", required=True, metavar="unix:PATH", help="of one agent; repeat it")
    parser.add_argument("--model", default=None, help="local directory (default: a small model made here)")
    parser.add_argument("--seed", type=int, default=0, help="of the default model's weights (default 0)")
    parser.add_argument("--device", choices=CHOICES, default="auto", help="where engines compute (default auto)")
    parser.add_argument("--conversations", type=int, default=len(workload.conversations), metavar="N")
    parser.add_argument(
        "--turns",
        type=int,
        default=max(conversation.turn_count for conversation in workload.conversations),
        metavar="N",
        help="of each conversation, at most",
    )
    parser.add_argument("--result", type=Path, default=None, metavar="FILE", help="also write the table there, as JSON")
    arguments = parser.parse_args(argv)
    if arguments.conversations < 1 or arguments.turns < 1:
        parser.error("--conversations and --turns must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """0: all tokens equal and the later engine hit; 1: not so, or something broke; 2: cannot run as asked."""
    arguments = parse_arguments(argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    workload = load_workload()
    conversations = workload.conversations[: arguments.conversations]
    turn_count = sum(min(conversation.turn_count, arguments.turns) for conversation in conversations)
    progress = Progress(turn_count * PHASE_COUNT)
    try:
        arguments.device = pick_device(arguments.device)
        with tempfile.TemporaryDirectory(prefix="kvpool-demo-") as directory:
            engines = Engines(arguments, Path(directory), progress)
            cold = engines.replay("cold", arguments.agent[0])
            shared = engines.replay("shared", arguments.agent[-1])
            report = DemoReport((cold, shared, engines.replay("reference")))
    except (KvPoolError, EngineFailed, OSError) as error:
        progress.close()
        print(f"demo: {error}", file=sys.stderr)
        return error.code if isinstance(error, EngineFailed) else EXIT_USAGE
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return EXIT_FAILED
    finally:
        progress.close()
    if arguments.result is not None:
        report.write(arguments.result)
    print(report.render())
    complaints = report.complaints()
    for complaint in complaints:
        print(f"demo: {complaint}", file=sys.stderr)
    return EXIT_FAILED if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
