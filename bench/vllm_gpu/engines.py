"""Real vLLM engines of the kinds that are compared. Weights are vLLM's dummy ones, prompts are random tokens."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_TOKENS = 16
WORKER = "bench.vllm_gpu.worker.BenchWorker"
KINDS = ("plain", "control", "offload", "simple", "reader", "kvpool")  # in the order in which they are started
TIERED_KINDS = ("tiering", "fs", "tier", "writer")  # vLLM's tiering offload; see EngineOptions.tiers
_SHARED = ("kvpool", "reader")  # kinds with kvpool's connector
_CONTROL_BLOCKS = 14_000

# 8B Llama, and one that a CPU computes, to try the bench out.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 128256,
    },
    # Gemma 3 12B: every sixth layer keeps all tokens, the others a window.
    "windows": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "vocab_size": 262208,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 1024,
        "layer_types": ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(48)],
        "tie_word_embeddings": True,
    },
    # Granite 4 Micro: four layers of attention, 36 with recurrent state (Mamba 2).
    "states": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "shared_intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 100352,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 64,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "layer_types": ["attention" if number in (5, 15, 25, 35) else "mamba" for number in range(40)],
        "position_embedding_type": "nope",
        "embedding_multiplier": 12,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8,
    },
}
# Granite 4 Small with one MLP, as large as the experts that a token uses, in place of its experts: 9 billion weights.
SHAPES["large-states"] = {
    **SHAPES["states"],
    "hidden_size": 4096,
    "intermediate_size": 9216,
    "shared_intermediate_size": 9216,
    "head_dim": 128,
    "mamba_n_heads": 128,
    "attention_multiplier": 0.0078125,
    "logits_scaling": 16,
}
# Steps that decode as CUDA graphs, and nothing compiled: that takes two minutes for `windows`. Eager steps are as fast
# as the processor is just then.
_QUICK_START: dict[str, Any] = {
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]},
    "kernel_config": {"enable_jit_warmup": False},
}
_STATES = {**_QUICK_START, "block_size": 1024, "mamba_cache_mode": "align", "enable_prefix_caching": True}
# Of models whose layers do not all keep the same tokens: their engines' arguments, and tokens of a chunk. vLLM makes as
# many blocks as the memory holds, with each kind of engine alike.
HYBRIDS: dict[str, tuple[dict[str, Any], int]] = {
    "windows": (_QUICK_START, 128),
    "states": (_STATES, 1024),
    "large-states": (_STATES, 1024),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How engines are started. blocks: of the GPU's cache; the control has as many as its working set needs."""

    root: Path
    agent: str = ""
    shape: str = "8b"
    eager: bool = False
    blocks: int = 8400
    control_blocks: int = _CONTROL_BLOCKS
    max_tokens: int = 36864
    offload_gib: float = 28.0
    memory_share: float = 0.2  # that must be free at the start
    revision: str = "1"
    extra: dict[str, Any] = field(default_factory=dict)
    gpus: str = ""  # that the engine sees, with commas between; empty: all
    division: dict[str, Any] = field(default_factory=dict)  # of the model among them, as vLLM's LLM takes it
    tiers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # secondary tiers of each of TIERED_KINDS
    blocks_per_chunk: int = 1  # of their offload

    @property
    def token_bytes(self) -> int:
        """KV of one token in bf16, if all layers kept it."""
        shape = SHAPES[self.shape]
        return int(2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2)


@dataclass(frozen=True, slots=True)
class Answer:
    """Of requests: wall time until all had ended, what they generated, tokens found in a cache."""

    seconds: float
    tokens: list[list[int]]
    cached: list[int]

    @property
    def ms(self) -> float:
        """Wall time."""
        return self.seconds * 1e3


def prompt(count: int, seed: int) -> list[int]:
    """Random tokens, which the vocabularies of all shapes have: an embedding that is not there ends an engine."""
    tokens: list[int] = np.random.default_rng(seed).integers(10, 100_000, count).tolist()
    return tokens


class Engine:
    """One vLLM engine; the model runs in a process of its own, as in `vllm serve`."""

    def __init__(self, kind: str, options: EngineOptions) -> None:
        self.kind, self.options = kind, options
        started_s = time.perf_counter()
        self._llm = _start(kind, options)
        self.start_seconds = time.perf_counter() - started_s
        self._collectors = _collectors()

    def ask(self, prompts: list[list[int]], new_tokens: int = 1) -> Answer:
        """All at once."""
        sampling = _sampling(new_tokens)
        asked = [{"prompt_token_ids": tokens} for tokens in prompts]
        started_s = time.perf_counter()
        outputs = self._llm.generate(asked, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started_s
        generated = [list(output.outputs[0].token_ids) for output in outputs]
        return Answer(seconds, generated, [output.num_cached_tokens or 0 for output in outputs])

    def ask_closed(self, prompts: list[list[int]], clients: int, new_tokens: int = 1) -> Answer:
        """In order, so many at a time: the next one as soon as any has ended."""
        sampling, core = _sampling(new_tokens), self._llm.llm_engine
        left = iter(enumerate(prompts))
        outputs: list[Any] = []

        def ask_next() -> None:
            for number, tokens in left:
                asked = {"type": "token", "prompt_token_ids": tokens}  # as LLM.generate makes of it
                core.add_request(f"closed-{number}", asked, sampling)
                return

        started_s = time.perf_counter()
        for _ in range(clients):
            ask_next()
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    outputs.append(output)
                    ask_next()
        seconds = time.perf_counter() - started_s
        outputs.sort(key=lambda output: int(output.request_id.rpartition("-")[2]))
        generated = [list(output.outputs[0].token_ids) for output in outputs]
        return Answer(seconds, generated, [output.num_cached_tokens or 0 for output in outputs])

    def warm(self) -> None:
        """The first steps of a process are slow, whatever serves them. No prompt of it is in any cache."""
        longest, seed = self.options.max_tokens, int.from_bytes(os.urandom(6), "little")
        for number in range(2):
            self.ask([prompt(min(4096, longest // 2), seed + number)], 2)
        self.ask([prompt(min(16_000, longest // 2), seed + 2)], 2)
        self.ask([prompt(min(1024, longest // 4), seed + 10 + number) for number in range(32)], 8)

    def call(self, method: str, *arguments: Any) -> Any:
        """A method of bench.vllm_gpu.worker.BenchWorker, in the worker's process."""
        return self.call_all(method, *arguments)[0]

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """The same in the processes of all workers."""
        answers: list[Any] = self._llm.collective_rpc(method, args=arguments)
        return answers

    @property
    def cache_tokens(self) -> int:
        """What its KV cache holds of a model all of whose layers keep all tokens."""
        cache = self._llm.llm_engine.vllm_config.cache_config
        return int(cache.num_gpu_blocks) * int(cache.block_size)

    def close(self) -> None:
        """End its processes."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()

    def forget(self, *, cpu_region: bool = False) -> bool:
        """Empty the GPU's prefix cache, and the CPU region of vLLM's offload; the pool keeps what it has.

        False: some blocks are in use, and vLLM has emptied nothing.
        """
        return bool(self._llm.reset_prefix_cache(reset_connector=cpu_region))

    def counters(self) -> dict[str, float]:
        """vLLM's counters of kvpool and of its external caches, by name, of this engine alone."""
        # Counts reach the front end with a step's outputs. The prompt is shorter than a block: no watch compares it.
        self.ask([prompt(10, 94)], 2)
        found = {
            metric.name.removeprefix("vllm:"): sum(one.value for one in metric.samples if one.name.endswith("_total"))
            for collector in self._collectors
            for metric in collector.collect()
            if metric.type == "counter" and ("kvpool" in metric.name or "external" in metric.name)
        }
        return {name: round(float(value), 3) for name, value in found.items() if value}


def start_all(kinds: list[str], options: EngineOptions) -> dict[str, Engine]:
    """One engine a kind, warmed; kvpool comes last."""
    engines: dict[str, Engine] = {}
    for kind in sorted(kinds, key=KINDS.index):
        engines[kind] = Engine(kind, options)
        print(json.dumps({"started": kind, "seconds": round(engines[kind].start_seconds, 1)}), flush=True)
    for engine in engines.values():
        engine.warm()
    return engines


def _collectors() -> list[Any]:
    """vLLM's metrics of the engine that was started last: a start takes those of earlier engines out of the registry,
    and each engine goes on to count in its own."""
    from prometheus_client import REGISTRY

    collectors = list(REGISTRY._collector_to_names)  # noqa: SLF001  # prometheus_client names them in no other way
    return [one for one in collectors if getattr(one, "_name", "").startswith("vllm:")]


def _sampling(new_tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=new_tokens,
        temperature=0.0,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,  # as LLM.generate asks for
    )


def with_more(options: EngineOptions, **more: Any) -> EngineOptions:
    """Options with other values."""
    return replace(options, **more)


def _start(kind: str, options: EngineOptions) -> Any:
    if kind not in (*KINDS, *TIERED_KINDS):
        raise ValueError(f"there is no kind {kind}; there are {', '.join((*KINDS, *TIERED_KINDS))}")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # several engines in one process: a fork would copy threads
    os.environ["VLLM_USE_SIMPLE_KV_OFFLOAD"] = "1" if kind == "simple" else "0"
    from vllm import LLM

    blocks = options.control_blocks if kind == "control" else options.blocks
    arguments: dict[str, Any] = {
        "model": _model_directory(options),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": options.max_tokens,
        "max_num_seqs": 64,
        "compilation_config": {"max_cudagraph_capture_size": 512},  # vLLM's default from 256 sequences on
        "enforce_eager": options.eager,
        "disable_log_stats": False,
        "generation_config": "vllm",
        "async_scheduling": True,
        "worker_extension_cls": WORKER,
    }
    more, chunk_tokens = HYBRIDS.get(options.shape, ({"num_gpu_blocks_override": blocks}, 0))
    arguments |= more
    if os.environ.get("BENCH_VLLM_DEVICE") != "cpu":
        arguments["gpu_memory_utilization"] = options.memory_share
        arguments["kv_cache_memory_bytes"] = blocks * BLOCK_TOKENS * options.token_bytes
    if kind in _SHARED:
        arguments["kv_transfer_config"] = {
            "kv_connector": "KvPoolConnector",
            "kv_connector_module_path": "kvpool.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "agent": options.agent,
                "model_id": f"dummy-{options.shape}",
                "model_revision": options.revision,
                **({"chunk_tokens": chunk_tokens} if chunk_tokens else {}),
                **options.extra,
            },
        }
    elif kind in ("offload", "simple"):
        arguments |= {"kv_offloading_size": options.offload_gib, "kv_offloading_backend": "native"}
    elif kind in TIERED_KINDS:
        arguments["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": int(options.offload_gib * (1 << 30)),
                "blocks_per_chunk": options.blocks_per_chunk,
                "secondary_tiers": options.tiers.get(kind, []),
            },
        }
    with visible_gpus(options.gpus):
        return LLM(**arguments, **options.division)


@contextmanager
def visible_gpus(gpus: str) -> Iterator[None]:
    """Processes that are started in the block see these GPUs alone; empty: all."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    try:
        yield
    finally:
        if gpus and before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        elif gpus and before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _model_directory(options: EngineOptions) -> str:
    root = options.root / options.shape
    root.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        **SHAPES[options.shape],
    }
    (root / "config.json").write_text(json.dumps(config))
    return str(root)
