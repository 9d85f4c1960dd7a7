"""A vLLM engine in a process of its own: `python -m tests.vllm.engine_process CONFIG`; commands and answers are JSON.

CONFIG: LLM's arguments, and `kvpool`, an extra config (absent for plain vLLM). One command a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}


def build(config: dict[str, Any]) -> Any:
    """The engine."""
    from vllm import LLM

    extra = config.pop("kvpool", None)
    if extra is not None:
        config["kv_transfer_config"] = {
            "kv_connector": "KvPoolConnector",
            "kv_connector_module_path": "kvpool.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    return LLM(
        enforce_eager=True, skip_tokenizer_init=True, disable_log_stats=False, **{"max_model_len": 4096, **config}
    )


def generate(llm: Any, command: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy tokens of each prompt, and how long all of them took together."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        max_tokens=command.get("max_tokens", 8), temperature=0.0, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in command["prompts"]]
    if command.get("salt"):
        prompts = [{**prompt, "cache_salt": command["salt"]} for prompt in prompts]
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "seconds": time.perf_counter() - started_s,
    }


def counters(llm: Any) -> dict[str, float]:
    """kvpool's counters and those of preemption, by name."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if "kvpool" in metric.name or "preempt" in metric.name:
            found[metric.name.removeprefix("vllm:")] = found.get(metric.name, 0) + getattr(metric, "value", 0)
    return found


def main() -> None:
    """Serve until stdin ends."""
    os.environ.update(ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own words go to stderr
    llm = build(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "generate":
            answer: dict[str, Any] = generate(llm, command)
        elif command["op"] == "counters":
            answer = dict(counters(llm))
        elif command["op"] == "reset":
            answer = {"reset": llm.reset_prefix_cache()}
        else:
            answer = {"error": f"no such command: {command['op']}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
