"""How much sooner is vLLM's first token when the prefix is loaded, and what does kvpool cost without a hit?

vLLM's CPU build serves a Llama of 12 layers x 1024 with random weights (float32), engines in processes of their own.
Sections: `loaded`: a fresh engine gets prompts whose first 1,500 tokens another engine has stored, and others that it
must compute. `nothing`: two engines, one without kvpool, take turns with prompts that are new to both. `killed`: a
pagestore or an agent is killed while a load waits for it.

Run: KVPOOL_VLLM_PYTHON=.venv-vllm/bin/python python -m bench.vllm_ttft SECTION [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.waiting import until
from tests.e2e.cli_cluster import Cluster
from tests.vllm.engine import Engine, Engines, agent_of, prompt
from tests.vllm.faults import load_is_running, pid_of
from tests.vllm.models import make_model

PREFIX_TOKENS = 1500
TAIL_TOKENS = 40
FRESH_TOKENS = 512  # of prompts in the section `nothing`
NEW_TOKENS = 16
_BACK_S = 60.0
ARGUMENTS: dict[str, Any] = {"block_size": 32, "as_shipped": True}


def ttft_s(engine: Engine, tokens: list[int]) -> float:
    """Seconds until the first token."""
    return engine.generate(tokens, new_tokens=1).seconds


def warmed(engine: Engine) -> Engine:
    """Run the slow first steps of a process, and return it."""
    for seed in (901, 902):
        engine.generate(prompt(200, seed), new_tokens=4)
    return engine


def loaded(engines: Engines, cluster: Cluster, rounds: int) -> dict[str, Any]:
    """TTFT of a fresh process with and without the prefix in the pool."""
    agent = agent_of(cluster)
    prefixes = [prompt(PREFIX_TOKENS, seed) for seed in range(rounds)]
    with engines.start(agent=agent, **ARGUMENTS) as first:
        for prefix in prefixes:
            first.generate(prefix, new_tokens=1)
        stored = first.counters().get("stored_chunks", 0)
    with engines.start(agent=agent, **ARGUMENTS) as second:
        warmed(second)
        cold, warm = [], []
        for number, prefix in enumerate(prefixes):
            warm.append(ttft_s(second, prefix + prompt(TAIL_TOKENS, 500 + number)))
            cold.append(ttft_s(second, prompt(PREFIX_TOKENS + TAIL_TOKENS, 700 + number)))
        counted = second.counters()
    return {
        "ttft loaded": _case(statistics.median(warm) * 1e3, statistics.median(cold) * 1e3, "ms"),
        "first request loaded": _case(warm[0] * 1e3, statistics.median(cold) * 1e3, "ms"),
        "counters": {"stored_chunks": stored, **counted},
    }


def nothing(engines: Engines, cluster: Cluster, rounds: int) -> dict[str, Any]:
    """Paired requests to engines with and without kvpool; no prompt comes twice."""
    with (
        engines.start(agent=agent_of(cluster), **ARGUMENTS) as shared,
        engines.start(**ARGUMENTS) as plain,
    ):
        warmed(shared)
        warmed(plain)
        first: list[tuple[float, float]] = []
        whole: list[tuple[float, float]] = []
        for number in range(rounds):
            seeds = (2000 + 4 * number, 2001 + 4 * number)
            pair = (shared, plain) if number % 2 else (plain, shared)
            ttft = {one: ttft_s(one, prompt(FRESH_TOKENS, seeds[0])) for one in pair}
            all_tokens = {
                one: one.generate(prompt(FRESH_TOKENS, seeds[1]), new_tokens=NEW_TOKENS).seconds for one in pair
            }
            first.append((ttft[shared], ttft[plain]))
            whole.append((all_tokens[shared], all_tokens[plain]))
    return {"ttft, nothing to share": _paired(first), "request, nothing to share": _paired(whole)}


def killed(engines: Engines, cluster: Cluster, rounds: int) -> dict[str, Any]:
    """What a request takes longer when what it loads from dies; seconds from its start."""
    answer: dict[str, Any] = {}
    tokens = prompt(PREFIX_TOKENS + TAIL_TOKENS, 1)
    with engines.start(agent=agent_of(cluster), **ARGUMENTS) as engine:
        warmed(engine)
        for first_seed, victim in ((800, "pagestore"), (850, "agent")):
            plain_s = statistics.median(ttft_s(engine, prompt(len(tokens), first_seed + n)) for n in range(rounds))
            _have_stored(engine, tokens)
            pagestore = pid_of(cluster, "pagestore")
            os.kill(pagestore, signal.SIGSTOP)  # so that the load is under way for certain
            begun = engine.begin(tokens, new_tokens=1)
            until(load_is_running(cluster), _BACK_S, "a load under way")
            os.kill(pid_of(cluster, victim), signal.SIGKILL)
            took_s = engine.generated(begun).seconds
            if victim != "pagestore":
                os.kill(pagestore, signal.SIGCONT)
            answer[f"{victim} killed under a load"] = _case(took_s * 1e3, plain_s * 1e3, "ms")
            answer[f"{victim} killed under a load"]["extra_ms"] = round((took_s - plain_s) * 1e3)
    return answer


def _have_stored(engine: Engine, tokens: list[int]) -> None:
    def found() -> bool:
        engine.generate(tokens, new_tokens=1)
        engine.counters()
        engine.forget()
        cached = engine.generate(tokens, new_tokens=1).cached[0] > 0
        engine.forget()
        return cached

    until(found, _BACK_S, "a prompt in the pool")


def _case(value: float, baseline: float, unit: str) -> dict[str, Any]:
    return {"value": round(value, 1), "unit": unit, "baseline": round(baseline, 1), "ratio": round(value / baseline, 3)}


def _paired(samples: list[tuple[float, float]]) -> dict[str, Any]:
    ratio = statistics.median(value / baseline for value, baseline in samples)
    values, baselines = zip(*samples, strict=True)
    return {
        **_case(statistics.median(values) * 1e3, statistics.median(baselines) * 1e3, "ms"),
        "ratio": round(ratio, 3),
    }


SECTIONS = {"loaded": loaded, "nothing": nothing, "killed": killed}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        model.mkdir()
        make_model(model, layers=arguments.layers, width=arguments.width, heads=8, kv_heads=8)
        cluster = Cluster(Path(directory) / "cluster")
        cluster.run("cluster", "up", "--detach", "--arena-bytes", "2GiB", "--disk-bytes", "4GiB")
        try:
            with Engines(model) as engines:
                cases = SECTIONS[arguments.section](engines, cluster, arguments.rounds)
        finally:
            cluster.run("cluster", "down")
    document = {"date": datetime.now(UTC).date().isoformat(), "cases": cases}
    print(json.dumps(document, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
