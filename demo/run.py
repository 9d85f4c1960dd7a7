"""`make demo`: engines that share prefixes through a running cluster, beside one that computes everything itself.

Phases, each in an engine process of its own that replays the same conversations:
  cold       the first engine; the cluster is empty
  shared     another engine, on another agent and pagestore, with what the first one left
  restart    after a flush the whole cluster is killed (SIGKILL) and started again; what is left is on disk
  reference  transformers without kvpool
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from demo.cluster import KEYSPACE_NAME, CommandFailed, DemoCluster
from demo.device import CHOICES, pick_device
from demo.progress import Progress
from demo.report import PHASES, DemoReport, PhaseResult, phase_from_document
from demo.workload import load_workload
from kvpool.core.errors import KvPoolError, StartupFailed
from kvpool_cli.logs import log_dir

REPOSITORY = Path(__file__).resolve().parents[1]
RESULT_PATH = REPOSITORY / ".kvpool" / "demo.json"
EXIT_FAILED = 1
EXIT_USAGE = 2
IDLE_LIMIT_S = 1800.0  # an engine that finishes no turn in this time hangs


class EngineFailed(Exception):
    """An engine process ended badly; `code` is what the demo exits with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Engines:
    """Starts engine processes, one at a time."""

    def __init__(self, arguments: argparse.Namespace, directory: Path, progress: Progress) -> None:
        self._directory, self._progress = directory, progress
        self._options = ["--seed", str(arguments.seed), "--conversations", str(arguments.conversations)]
        self._options += ["--turns", str(arguments.turns), "--device", arguments.device]
        if arguments.model is not None:
            self._options += ["--model", arguments.model]

    def check_model(self) -> None:
        """Raises EngineFailed for a model that cannot be served, before anything else is started."""
        self._run("check", "--check-only")

    def replay(self, phase: str, agent: str = "", awaited: Sequence[tuple[Sequence[int], int]] = ()) -> PhaseResult:
        """All conversations on a fresh engine. Raises EngineFailed.

        awaited: prompts and how many of their tokens the cluster must have before the engine begins.
        """
        self._progress.phase(phase)
        awaited_path = self._directory / f"engine-{phase}-awaited.json"
        awaited_path.write_text(json.dumps(awaited))
        output = self._run(phase, "--agent", agent, "--await", str(awaited_path.resolve()))
        return phase_from_document(phase, json.loads(output.read_text()))

    def _run(self, phase: str, *options: str) -> Path:
        output = self._directory / f"engine-{phase}.json"
        log_path = log_dir(self._directory) / f"engine-{phase}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "demo.engine", "--name", f"demo-{phase}", "--output", str(output.resolve())]
        with log_path.open("wb") as log, ExitStack() as stack:
            process = subprocess.Popen(
                [*command, *self._options, *options],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C reaches the demo alone, which ends the engine
            )
            stack.callback(_end, process)
            assert process.stdout is not None, "stdout is a pipe"
            while line := _within(IDLE_LIMIT_S, process, process.stdout.readline):
                self._progress.step(f"{phase}: {line.strip()}")
            code = process.wait()
        if code:
            lines = log_path.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
            raise EngineFailed(
                f"engine {phase}: {lines[-1].removeprefix('demo: ')}", EXIT_USAGE if code == 2 else EXIT_FAILED
            )
        return output


def _within(limit_s: float, process: subprocess.Popen[str], read: Callable[[], str]) -> str:
    """What `read` returns; the process is killed, which ends the read, when that takes too long."""
    watchdog = threading.Timer(limit_s, process.kill)
    watchdog.daemon = True  # an interrupt may come before we can cancel it
    try:
        watchdog.start()
        return read()
    finally:
        watchdog.cancel()


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def run_phases(cluster: DemoCluster, engines: Engines, progress: Progress) -> DemoReport:
    """All phases in order. Raises EngineFailed, CommandFailed."""
    progress.phase("starting the cluster")
    cluster.up()
    cold = engines.replay("cold", cluster.agent(0))
    shared = engines.replay("shared", cluster.agent(1))
    progress.phase("flushing, killing and restarting the cluster")
    cluster.flush()
    first_prompts = [turn.prompt for turn in cold.turns if turn.turn == 0]
    durable = [(prompt, cluster.matched_tokens(KEYSPACE_NAME, prompt)) for prompt in first_prompts]
    cluster.kill()
    cluster.up()
    restart = engines.replay("restart", cluster.agent(0), awaited=durable)
    progress.phase("ending the cluster")
    cluster.down()
    return DemoReport((cold, shared, restart, engines.replay("reference")))


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Defaults are the whole workload on the demo's own model."""
    workload = load_workload()
    turn_count = max(conversation.turn_count for conversation in workload.conversations)
    parser = argparse.ArgumentParser(
        prog="demo.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=None, help="local directory or hub id (default: a small model made here)")
    parser.add_argument("--seed", type=int, default=0, help="of the default model's weights (default 0)")
    parser.add_argument(
        "--device", choices=CHOICES, default="auto", help="where engines compute (default auto: cuda if it can be had)"
    )
    parser.add_argument("--state-dir", type=Path, default=REPOSITORY / ".kvpool" / "demo", help="default .kvpool/demo")
    parser.add_argument("--result", type=Path, default=RESULT_PATH, metavar="FILE", help="default .kvpool/demo.json")
    parser.add_argument("--conversations", type=int, default=len(workload.conversations), metavar="N")
    parser.add_argument("--turns", type=int, default=turn_count, metavar="N", help="of each conversation, at most")
    arguments = parser.parse_args(argv)
    if arguments.conversations < 1 or arguments.turns < 1:
        parser.error("--conversations and --turns must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """0: all tokens equal and both later phases hit; 1: not so, or something broke; 2: cannot run as asked."""
    arguments = parse_arguments(argv)
    # Also SIGINT: who was started in the background of a script inherits that it is ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    arguments.result.unlink(missing_ok=True)  # what is there afterwards is of this run
    try:
        arguments.device = pick_device(arguments.device)
        with _only_demo(arguments.state_dir):
            return _run(arguments, DemoCluster(arguments.state_dir, arguments.device))
    except KvPoolError as error:
        print(f"demo: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return EXIT_FAILED


@contextmanager
def _only_demo(state_dir: Path) -> Iterator[None]:
    """Raises StartupFailed if another demo uses the directory: it would lose its cluster to us."""
    path = state_dir.with_name(f"{state_dir.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartupFailed(f"{path} cannot be written ({error.strerror}); choose another --state-dir") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise StartupFailed(f"another demo runs in {state_dir}; choose another --state-dir") from None
    finally:
        os.close(descriptor)


def _run(arguments: argparse.Namespace, cluster: DemoCluster) -> int:
    workload = load_workload()
    conversations = workload.conversations[: arguments.conversations]
    turn_count = sum(min(conversation.turn_count, arguments.turns) for conversation in conversations)
    with ExitStack() as stack:
        cluster.wipe()
        stack.callback(cluster.down)
        progress = Progress(turn_count * len(PHASES))
        stack.callback(progress.close)
        engines = Engines(arguments, cluster.directory, progress)
        try:
            if arguments.model is not None:
                engines.check_model()
            report = run_phases(cluster, engines, progress)
        except EngineFailed as error:
            progress.close()
            if error.code != EXIT_USAGE:
                print(cluster.log_tails(), file=sys.stderr)
            print(f"demo: {error}", file=sys.stderr)
            return error.code
        except (CommandFailed, subprocess.TimeoutExpired) as error:
            progress.close()
            print(cluster.log_tails(), file=sys.stderr)
            print(f"demo: {error}", file=sys.stderr)
            return EXIT_FAILED
    report.write(arguments.result)
    print(report.render())
    complaints = report.complaints()
    for complaint in complaints:
        print(f"demo: {complaint}", file=sys.stderr)
    cluster.remove_data()
    return EXIT_FAILED if complaints else 0


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
