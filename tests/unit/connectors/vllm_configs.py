"""What the vLLM connector reads of a configuration and of KV cache groups, as vLLM has them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool.connectors.vllm.identity import KvCacheInfo, kv_cache_infos
from kvpool.connectors.vllm.settings import VllmSettings

SETTINGS = VllmSettings(agent="unix:/a", model_revision="r1")


class FullAttentionSpec:
    """Named as vLLM's."""

    def __init__(self, **values: Any) -> None:
        self.block_size, self.num_kv_heads, self.head_size, self.dtype = 16, 4, 64, torch.bfloat16
        self.page_size_bytes = 16 * 4 * 2 * 64 * 2
        self.head_size_v, self.num_head_slots, self.tokens_per_state = 64, None, 1
        self.sliding_window, self.non_causal = None, False
        vars(self).update(values)


class SlidingWindowSpec(FullAttentionSpec):
    """Another kind."""


class ChunkedLocalAttentionSpec(FullAttentionSpec):
    """A kind that is not served."""


class MLAAttentionSpec(FullAttentionSpec):
    """A latent's, or a sparse-attention indexer's."""


class UniformTypeKVCacheSpecs:
    """Of layers with unequal specs in one group."""

    def __init__(self, *specs: Any) -> None:
        self.kv_cache_specs, self.block_size = dict(enumerate(specs)), 64


class MambaSpec:
    """Of recurrent state, as vLLM's."""

    def __init__(self, **values: Any) -> None:
        self.block_size, self.mamba_cache_mode, self.mamba_type = 512, "align", SimpleNamespace(name="GDN_ATTN")
        self.shapes, self.dtypes = ((3, 512), (4, 64, 64)), (torch.bfloat16, torch.float32)
        self.state_content_size_bytes = 3 * 512 * 2 + 4 * 64 * 64 * 4
        vars(self).update(values)


def configured(
    *,
    tp: int = 1,
    device: str = "cuda",
    quantization: str | None = None,
    mla: bool = False,
    load_format: str = "auto",
    overrides: Any = None,
    text_config: dict[str, Any] | None = None,
    max_model_len: int = 4096,
    fitted: bool = False,
    cache_dtype: str = "auto",
    drafter: Any = None,
    **cache: Any,
) -> Any:
    """What is read of a VllmConfig: 8 layers, 8 KV heads x 64. fitted: with max_model_len -1."""
    values = {"rope_theta": 1e4, "_name_or_path": "somewhere"} | (text_config or {})
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype, **cache),
        load_config=SimpleNamespace(load_format=load_format),
        speculative_config=drafter,
        num_prefill_lookahead_tokens=(drafter.num_speculative_tokens if drafter.use_multi_module_mtp() else 1)
        if drafter is not None
        else 0,
        model_config=SimpleNamespace(
            model="org/model",
            dtype=torch.bfloat16,
            quantization=quantization,
            use_mla=mla,
            hf_config=SimpleNamespace(_commit_hash=None),
            hf_overrides=overrides or {},
            hf_text_config=SimpleNamespace(to_dict=lambda: values, **values),
            max_model_len=max_model_len,
            original_max_model_len=-1 if fitted else max_model_len,
            get_total_num_hidden_layers=lambda: 8,
            get_total_num_kv_heads=lambda: 8,
            get_head_size=lambda: 64,
        ),
    )


def a_drafter(method: str = "eagle3", *, kv_heads: int = 8, modules: int = 1, **model: Any) -> Any:
    """What is read of a SpeculativeConfig. modules: of MTP that are chained."""
    values = {"hidden_size": 512, "draft_vocab_size": None}
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=3,
        use_multi_module_mtp=lambda: modules > 1,
        draft_load_config=None,
        draft_model_config=SimpleNamespace(
            **{
                "model": "org/drafter",
                "dtype": torch.bfloat16,
                "quantization": None,
                "use_mla": False,
                "hf_config": SimpleNamespace(_commit_hash="d1"),
                "hf_overrides": {},
                "hf_text_config": SimpleNamespace(to_dict=lambda: values),
                "get_total_num_kv_heads": lambda: kv_heads,
                "get_head_size": lambda: 64,
            }
            | model
        ),
    )


TARGET = [f"model.layers.{number}.self_attn.attn" for number in range(8)]


def groups(*specs: Any, names: list[str] = TARGET) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=list(names)) for spec in specs]
    )


def the_facts(config: Any, caches: Any) -> KvCacheInfo:
    """Of an engine with one KV cache group."""
    (facts,) = kv_cache_infos(config, caches)
    return facts


def with_draft(*names: str) -> Any:
    """The one group of a drafter whose layers have the model's shape, in the order in which vLLM makes them."""
    return groups(FullAttentionSpec(), names=[*TARGET, *names])


def install_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `import vllm...` find what the connector reads of it, of version 9.9, until the test ends."""
    module = ModuleType("vllm")
    module.__version__ = "9.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    names: Any = ModuleType("vllm.model_executor.models.utils")
    names.extract_layer_index = lambda name: next(int(part) for part in name.split(".") if part.isdigit())
    for package in ("vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, names.__name__, names)
    output: Any = ModuleType("vllm.v1.core.sched.output")
    output.KVConnectorBlockState = type("State", (), {"__annotations__": {"boundary_state_offloads": dict}})
    sched: Any = ModuleType("vllm.v1.core.sched")
    sched.output = output
    for package in ("vllm.v1", "vllm.v1.core"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, sched.__name__, sched)
