"""How long until the first token, with the prefix's KV loaded from a pagestore's staging memory or recomputed?

Starts a cluster of its own (Redis, index, one pagestore, one agent), has one engine process compute and
store prompts, and another one load them: match, load, verification and one step for the last token. Both are the
transformers connector on a Llama with random weights; the model alone (sdpa) is the baseline. Also checked: the KV that
arrives is the KV that was stored, bit for bit, and the first token is the one that the model alone gives.

Run: python -m bench.ttft_gpu [--device cuda] [--shape 8b] [--tokens 8192 16384 32768] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvpool.core.byte_sizes import size_from_text
from kvpool_cli.output import as_text, table
from kvpool_cli.state import read_state

REPOSITORY = Path(__file__).resolve().parents[1]
DOWN_TIMEOUT_S = 20.0
COLUMNS = ("match", "hash and find", "load", "copy into cache", "forward")


class Bench:
    """Children of one run, all of which end with it, at the latest when its time is up."""

    def __init__(self, budget_s: float, state_dir: Path) -> None:
        self._ends_at_s = time.monotonic() + budget_s
        self.state_dir = state_dir

    def run(self, *command: str, environment: dict[str, str] | None = None) -> None:
        """A command that must succeed within the time that is left; it says what it does on our stdout."""
        left_s = max(1.0, self._ends_at_s - time.monotonic())
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", *command],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            code = process.wait(left_s)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if code:
            raise SystemExit(f"{command[0]} ended with code {code}")

    def kvpool(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        """A kvpool command on our cluster."""
        self.run("kvpool_cli", "--state-dir", str(self.state_dir), *arguments, environment=environment)

    @property
    def agent(self) -> str:
        """Its endpoint."""
        state = read_state(self.state_dir)
        assert state is not None, "the cluster runs"
        return f"unix:{state.of_role('agent')[0].endpoints['socket']}"

    def end(self, show_logs: bool) -> None:
        """No process of the cluster is left."""
        if show_logs:
            for path in sorted((self.state_dir / "logs").glob("*.log")):
                lines = path.read_text(errors="replace").splitlines()[-15:]
                print("\n".join(f"{path.stem}: {line[:400]}" for line in lines), flush=True)
        state = read_state(self.state_dir)
        if state is None:
            return
        self._ends_at_s = time.monotonic() + DOWN_TIMEOUT_S
        with suppress(subprocess.TimeoutExpired, SystemExit):
            self.kvpool("cluster", "down")
        left = [process.pid for process in state.processes if process.alive()]
        for pid in ([state.supervisor_pid] if state.supervised() else []) + left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def state_directory() -> Iterator[Path]:
    """Of the cluster; removed in the end."""
    with tempfile.TemporaryDirectory(prefix="kvpool-ttft-", ignore_cleanup_errors=True) as state:
        yield Path(state) / "cluster"


def measure(bench: Bench, arguments: argparse.Namespace) -> dict[str, Any]:
    """By number of tokens."""
    threads = str(min(8, os.cpu_count() or 2))
    bench.kvpool(
        *("cluster", "up", "--pagestores", "1", "--agents", "1", "--device", arguments.device, "--detach"),
        *("--arena-bytes", str(arguments.arena_bytes), "--disk-bytes", str(2 * arguments.arena_bytes)),
        environment={"KVPOOL_GPUAGENT_COPY_THREADS": threads, "KVPOOL_PAGESTORE_VERIFY_THREADS": threads},
    )
    stored, output = bench.state_dir / "stored.json", bench.state_dir / "output.json"
    options = (
        *("--shape", arguments.shape, "--device", arguments.device, "--agent", bench.agent),
        *("--tokens", *map(str, arguments.tokens), "--runs", str(arguments.runs)),
        *("--stored", str(stored), "--output", str(output)),
    )
    for role in ("store", "load"):
        print(f"engine process: {role}", flush=True)
        bench.run("bench.ttft_engine", role, *options)
    results: dict[str, Any] = json.loads(output.read_text())
    return results


def render(results: dict[str, Any]) -> str:
    """The table."""
    rows = []
    for tokens, result in results.items():
        steps = result["step_by_step_ms"]
        equal = result["token_equal"], result["kv_equal"], result["logits_equal"]
        rows.append(
            [
                tokens,
                f"{result['recomputed_ms']:.1f}",
                f"{result['loaded_ms']:.1f}",
                f"{result['ratio']:.1f}",
                f"{result['load_gb_per_s']:.1f}",
                *(f"{steps[name]:.1f}" for name in COLUMNS),
                f"{result['step_by_step_ms_total']:.1f}",
                "/".join("yes" if good else "NO" for good in equal),
            ]
        )
    headers = ["tokens", "recomputed ms", "loaded ms", "ratio", "load GB/s", *COLUMNS, "sum", "token/KV/logits equal"]
    return as_text(table(headers, rows, right=range(len(headers) - 1)))


def main(argv: Sequence[str] | None = None) -> int:
    """0: everything equal, and all from staging; 1: not so."""
    parser = argparse.ArgumentParser(
        prog="bench.ttft_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="multiples of 256")
    parser.add_argument("--runs", type=int, default=3, help="samples of each recomputed figure")
    parser.add_argument("--arena-bytes", type=size_from_text, default=10 << 30)
    parser.add_argument("--budget-s", type=float, default=200.0, help="everything is ended after this")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with state_directory() as state_dir:
        bench = Bench(arguments.budget_s, state_dir)
        well = False
        try:
            results = measure(bench, arguments)
            well = True
        finally:
            bench.end(show_logs=not well)
    print(render(results), flush=True)
    document = {
        "command": "python -m bench.ttft_gpu " + " ".join(sys.argv[1:] if argv is None else argv),
        "device": arguments.device,
        "shape": arguments.shape,
        "results": results,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    good = all(
        result[name]
        for result in results.values()
        for name in ("token_equal", "kv_equal", "logits_equal", "from_staging")
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
