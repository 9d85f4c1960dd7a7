"""A real vLLM with CUDA, with kvpool, with vLLM's own offload, and plain.

One phase: `python -m bench.vllm_gpu PHASE --kinds plain,kvpool --agent unix:SOCKET`. A list of phases, each in a
process of its own, within a time: `python -m bench.vllm_gpu all --list quick --budget-s 540`; its cases go to
OUT/vllm-gpu.json. Start `kvpool cluster up --device cuda --arena-bytes 64GiB` first; see bench/README.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.vllm_gpu.about import about
from bench.vllm_gpu.cases import cases
from bench.vllm_gpu.engines import SHAPES, EngineOptions
from bench.vllm_gpu.host_usage import UsageSample, used
from bench.vllm_gpu.phases import PHASES, Plan
from bench.vllm_gpu.samples import Collected, Recorder, Sample, Samples

_PHASE_ENDED = '{"phase": "ended"}'  # its engines may keep the pipe open for a while


@dataclass(frozen=True, slots=True)
class Step:
    """One phase of a list. seconds: what it takes on an H200 (with two GPUs: on H100s, from a cold disk), about; it is
    left out if there is less time."""

    name: str
    arguments: str
    seconds: float


LISTS = {
    "quick": [
        Step("ttft", "ttft --kinds plain,kvpool --count 4 --runs 1", 90),
        Step("load", "load --kinds kvpool --count 4", 40),
        Step("press", "press --kinds control,offload,kvpool --concurrency 4,24", 110),
        Step("press-simple", "press --kinds simple", 45),
    ],
    "final-1": [
        Step("ttft", "ttft --kinds plain,kvpool,reader --count 10 --runs 5", 365),
        Step("load", "load --kinds kvpool --count 8", 85),
    ],
    "final-2": [
        Step("press", "press --kinds control,offload,kvpool --runs 3 --clients 4", 235),
        Step("store-rate", "store-rate --runs 5", 75),
        Step("press-simple", "press --kinds simple,kvpool --salt 1", 195),
    ],
    "final-3": [
        Step("bytes", "bytes --rounds 2 --prefixes 24", 145),
        Step("zeroed", "zeroed --count 4", 75),
        Step("kills", "kills --kinds kvpool", 275),
    ],
    "transfers": [  # at link speed nothing reaches a disk: `kvpool cluster up --disk-bytes 0`
        Step("layouts", "layouts --kinds plain", 55),
        Step("beside", "beside --kinds plain", 190),
        Step("timeline", "timeline", 85),
    ],
    "two-gpus-1": [  # `kvpool cluster up --agents 2`, and `--agent auto:DIRECTORY`
        Step("pull", "pull --lengths 2048,8192,16384 --count 4 --runs 3", 220),
        Step("copies", "copies --kinds plain", 45),
        # Four engines side by side: small caches, which must hold a prompt of the most tokens.
        Step("ranks", "ranks --count 2 --prefix-tokens 2048 --eager --blocks 2000 --max-tokens 20480", 230),
    ],
    "two-gpus-2": [  # likewise, with `--disk-bytes 0`: it stores faster than a disk writes
        Step("two-engines", "two-engines --runs 3", 225),
    ],
    "two-gpus-3": [  # as two-gpus-1
        Step("pull-kills", "pull-kills --eager --prefix-tokens 4096 --max-tokens 20480", 500),
    ],
    "hybrid": [  # with `--shape windows --lengths 16384` and `--shape states --lengths 16448`
        Step("ttft", "ttft --kinds plain,kvpool --count 4 --runs 5", 100),
        Step("load", "load --kinds kvpool --count 4", 50),
    ],
    "cpu": [
        Step("bytes", "bytes --kinds kvpool --rounds 2 --prefixes 24", 150),
        Step("zeroed", "zeroed --kinds kvpool --count 4", 100),
        Step("kills", "kills --kinds kvpool --kills 20", 1200),
    ],
}


def main() -> int:
    arguments = _arguments()
    if arguments.phase == "all":
        arguments.out.mkdir(parents=True, exist_ok=True)
        return _run_list(arguments)
    from bench.vllm_gpu import copies, faults, pull_kills, ranks, transfers

    of_modules = (transfers.PHASES, faults.PHASES, ranks.PHASES, copies.PHASES, pull_kills.PHASES)
    phases = dict(PHASES)
    for of_module in of_modules:
        phases |= of_module
    code = 0
    try:
        phases[arguments.phase](_plan(arguments), Recorder())
    except Exception:
        traceback.print_exc()
        code = 1
    print(_PHASE_ENDED, flush=True)
    for engine in multiprocessing.active_children():
        engine.kill()  # their orderly end takes seconds
    os._exit(code)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "phase",
        help="all, or one of: ttft load press decode bytes zeroed timeline store-rate beside layouts kills ranks "
        "pull two-engines copies pull-kills",
    )
    parser.add_argument("--list", choices=LISTS, default="quick", help="of phases, for `all`")
    parser.add_argument("--only", default="", help="of the list: names with commas between")
    parser.add_argument("--budget-s", type=float, default=540.0, help="`all` begins nothing that would take longer")
    parser.add_argument("--out", type=Path, default=Path("vllm-gpu"), help="directory")
    parser.add_argument("--kinds", "--kind", default="kvpool", help="of engines, with commas between")
    parser.add_argument("--agent", default="", help="endpoint: unix:/path, or auto:/directory")
    parser.add_argument("--root", type=Path, default=Path("/tmp/vllm-gpu-model"), help="where the model's config goes")
    parser.add_argument("--shape", default="8b", choices=tuple(SHAPES))
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs, for a quick try")
    parser.add_argument("--extra", default="{}", help="more of kv_connector_extra_config, JSON")
    parser.add_argument("--blocks", type=int, default=8400, help="of the GPU's cache, 16 tokens each")
    parser.add_argument("--control-blocks", type=int, default=14_000)
    parser.add_argument("--max-tokens", type=int, default=36864)
    parser.add_argument("--offload-gib", type=float, default=28.0)
    parser.add_argument("--memory-share", type=float, default=0.2)
    parser.add_argument("--lengths", default="2048,8192,16384,32768")
    parser.add_argument("--count", type=int, default=4, help="prompts of each length")
    parser.add_argument("--runs", type=int, default=1, help="alternated ones")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefixes", type=int, default=24)
    parser.add_argument("--prefix-tokens", type=int, default=8192)
    parser.add_argument("--concurrency", default="4", help="requests at a time, with commas between: `press` with each")
    parser.add_argument("--clients", default="", help="with commas between: `press` with so many that ask on their own")
    parser.add_argument("--decode", default="32,1024,256", help="requests, tokens in, tokens out")
    parser.add_argument("--kills", type=int, default=3, help="of each service, with a load or store under way")
    parser.add_argument("--salt", type=int, default=0, help="other prompts, and other moments of kills")
    return parser.parse_args()


def _plan(arguments: argparse.Namespace) -> Plan:
    requests, tokens, new_tokens = (int(part) for part in arguments.decode.split(","))
    return Plan(
        kinds=arguments.kinds.split(","),
        options=_options(arguments),
        lengths=tuple(int(part) for part in arguments.lengths.split(",")),
        count=arguments.count,
        runs=arguments.runs,
        rounds=arguments.rounds,
        prefixes=arguments.prefixes,
        prefix_tokens=arguments.prefix_tokens,
        concurrency=tuple(int(part) for part in arguments.concurrency.split(",")),
        clients=tuple(int(part) for part in arguments.clients.split(",") if part),
        decode_requests=requests,
        decode_tokens=(tokens, new_tokens),
        kills=arguments.kills,
        salt=arguments.salt,
    )


def _options(arguments: argparse.Namespace) -> EngineOptions:
    return EngineOptions(
        root=arguments.root,
        agent=arguments.agent,
        shape=arguments.shape,
        eager=arguments.eager,
        blocks=arguments.blocks,
        control_blocks=arguments.control_blocks,
        max_tokens=arguments.max_tokens,
        offload_gib=arguments.offload_gib,
        memory_share=arguments.memory_share,
        extra=json.loads(arguments.extra),
    )


def _run_list(arguments: argparse.Namespace) -> int:
    started_s = time.monotonic()
    chosen = [name for name in arguments.only.split(",") if name]
    steps = [step for step in LISTS[arguments.list] if not chosen or step.name in chosen]
    samples: list[Sample] = []
    notes: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    result = arguments.out / "vllm-gpu.json"
    for step in steps:
        left_s = arguments.budget_s - (time.monotonic() - started_s)
        if left_s < step.seconds:
            print(json.dumps({"left out": step.name, "would take": step.seconds, "left_s": round(left_s)}), flush=True)
            continue
        before = UsageSample.take(arguments.agent)
        collected = Collected()
        code = _run_phase(arguments, step, left_s, collected)
        samples += collected.samples
        after = UsageSample.take(arguments.agent)
        ended = {"exit": code, "seconds": round(after.at_s - before.at_s), "processors": used(before, after)}
        notes[step.name] = {**collected.notes, **ended}
        found = cases(Samples(samples), _options(arguments).token_bytes)
        for name, case in found.items():
            if shown.get(name) != case:
                print(json.dumps({"case": name, **case}), flush=True)
        shown = found
        result.write_text(json.dumps({"about": about(), "cases": found, "notes": notes}, indent=1) + "\n")
        print(json.dumps({"done": step.name, **ended}), flush=True)
    return 0


def _run_phase(arguments: argparse.Namespace, step: Step, left_s: float, collected: Collected) -> int:
    """In a session of its own, so that no engine outlives it. All lines go to files."""
    command = [sys.executable, "-m", "bench.vllm_gpu", *_step_arguments(arguments, step)]
    log_file = arguments.out / f"{step.name}.log"
    with log_file.open("wb") as log, (arguments.out / f"{step.name}.jsonl").open("w") as lines:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        deadline = _Deadline(process, step.name, left_s)
        assert process.stdout is not None
        for line in process.stdout:  # vLLM's processes write there, too
            text = line.decode(errors="replace")
            if text.startswith(_PHASE_ENDED):
                break
            if collected.take(text):
                lines.write(text)
                lines.flush()
            elif text.startswith("{"):
                print(text, end="", flush=True)
            else:
                log.write(line)
        code = process.wait()
        deadline.end()
    for name, value in collected.notes.items():
        if name.startswith("counters"):
            print(json.dumps({name: value}), flush=True)
    if code:
        print(log_file.read_bytes()[-2500:].decode(errors="replace"), flush=True)
    return code


def _step_arguments(arguments: argparse.Namespace, step: Step) -> list[str]:
    """A step's own and those of the whole list. Where both name one, the step's count for the shape that it was written
    for, the list's for another shape."""
    same = ["root", "shape", "extra", "blocks", "control_blocks", "max_tokens", "offload_gib", "memory_share"]
    if arguments.shape != "8b":
        same += ["lengths", "prefix_tokens", "decode"]
    lists = [part for name in same for part in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]
    lists += ["--agent", arguments.agent, *(["--eager"] if arguments.eager else [])]
    phase, *own = step.arguments.split()
    return [phase, *lists, *own] if arguments.shape == "8b" else [phase, *own, *lists]  # the last one counts


class _Deadline:
    """Ends a phase and everything that it started, at the latest after so long."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, seconds: float) -> None:
        self._process, self._name = process, name
        self._alarm = signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))

    def end(self) -> None:
        """It has ended; whatever it left behind ends now."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._alarm)
        self._kill()

    def _on_alarm(self, number: int, frame: object) -> None:
        print(json.dumps({"cut off": self._name}), flush=True)
        self._kill()

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


if __name__ == "__main__":
    sys.exit(main())
