"""vLLM engines in processes of their own, and the model that they serve."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster

VLLM_PYTHON_VARIABLE = "KVPOOL_VLLM_PYTHON"  # the interpreter that has vLLM
REPOSITORY = Path(__file__).resolve().parents[2]
VOCABULARY = 2048
CHUNK = 128
_END_S = 60.0


def make_model(directory: Path, *, layers: int = 4, width: int = 256, heads: int = 4, kv_heads: int = 2) -> Path:
    """Save a Llama with fixed random weights, made so that a wrong chunk changes tokens (see tiny_models)."""
    from tests.unit.connectors.tiny_models import tiny_llama

    model = tiny_llama(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
    )
    model.save_pretrained(directory)
    return directory


def prompt(token_count: int, seed: int) -> list[int]:
    """Random token ids."""
    tokens: list[int] = np.random.default_rng(seed).integers(1, VOCABULARY, token_count).tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class Generated:
    """Of some prompts. cached: prompt tokens that were not computed, from wherever they came."""

    tokens: list[list[int]]
    cached: list[int]
    seconds: float


class Engine:
    """One engine; ends with the `with` block."""

    def __init__(self, model: Path, *, agent: str = "", extra: dict[str, Any] | None = None, **arguments: Any) -> None:
        """agent: of kvpool; empty for plain vLLM. arguments: of vllm.LLM."""
        config: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "num_gpu_blocks_override": 6144 // arguments.get("block_size", 32),
            **arguments,
        }
        if agent:
            config["kvpool"] = {
                "agent": agent,
                "model_id": "tiny",
                "chunk_tokens": CHUNK,
                "load": "always",
                **(extra or {}),
            }
        python = os.environ[VLLM_PYTHON_VARIABLE]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'clients/python'}",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        if config.get("block_size", 32) % 32:
            environment["PYTHONPATH"] += f":{_block_16_plugin(model)}"
        self._log: IO[bytes] = (model / f"engine-{len(list(model.glob('*.log')))}.log").open("w+b")
        self._process = subprocess.Popen(
            [python, "-m", "tests.vllm.engine_process", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            cwd=REPOSITORY,
        )

    def __enter__(self) -> Self:
        try:
            self._answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def generate(self, *prompts: Sequence[int], new_tokens: int = 12, salt: str = "") -> Generated:
        """Greedy, all prompts at once."""
        self.begin(*prompts, new_tokens=new_tokens, salt=salt)
        return self.generated()

    def begin(self, *prompts: Sequence[int], new_tokens: int = 12, salt: str = "") -> None:
        """Begin to generate; `generated` waits for the end."""
        self._ask({"op": "generate", "prompts": [list(one) for one in prompts], "max_tokens": new_tokens, "salt": salt})

    def generated(self) -> Generated:
        """What was begun."""
        return Generated(**self._answer())

    def counters(self) -> dict[str, float]:
        """kvpool's counters so far."""
        self.generate([5, 6, 7], new_tokens=2)  # counters of the last step come with the next
        self._ask({"op": "counters"})
        found = self._answer()
        return {name.removeprefix("kvpool_"): value for name, value in found.items()}

    def await_stored(self, chunk_count: int) -> None:
        """Wait until so many chunks in all are in the pool; an idle engine hears of it with its next request."""
        eventually_sync(lambda: self.counters().get("stored_chunks", 0) >= chunk_count, deadline_s=_END_S)

    def forget(self) -> None:
        """Drop what the engine itself holds of prefixes, as soon as no store needs its blocks."""

        def forgotten() -> bool:
            self._ask({"op": "reset"})
            return bool(self._answer()["reset"])

        eventually_sync(forgotten, deadline_s=_END_S)

    def log(self) -> str:
        """What the engine said."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _ask(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine ended:\n{self.log()[-3000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def _block_16_plugin(directory: Path) -> Path:
    """A vLLM plugin, which every process of an engine loads: vLLM 0.32's CPU backend says that it has no blocks of 16
    tokens, although its kernels do."""
    plugin = directory / "plugin"
    (plugin / "block_16-0.dist-info").mkdir(parents=True, exist_ok=True)
    (plugin / "block_16-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: block-16\nVersion: 0\n")
    (plugin / "block_16-0.dist-info" / "entry_points.txt").write_text("[vllm.general_plugins]\nb16 = block_16:allow\n")
    (plugin / "block_16.py").write_text(
        "def allow():\n"
        "    from vllm.v1.attention.backend import MultipleOf\n"
        "    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend as backend\n"
        "    backend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])\n"
    )
    return plugin


def agent_of(cluster: Cluster, number: int = 0) -> str:
    """Its endpoint."""
    return f"unix:{cluster.state.of_role('agent')[number].endpoints['socket']}"
