"""Which keyspace a vLLM engine's KV belongs to, read off its configuration."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvpool.connectors.vllm.identity import (
    CacheFacts,
    cache_facts,
    check_ranks,
    keyspace_name,
    layer_order,
    model_revision,
    model_spec,
    part_of_rank,
)
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.core.errors import GeometryUnsupported, InvalidRequest, PartitionRefused
from kvpool.core.geometry import PayloadKind
from kvpool.core.keyspace import Codec, Dtype

SETTINGS = VllmSettings(agent="unix:/a", model_revision="r1")
ROWS = CacheFacts(block_tokens=16, head_count=4, row_bytes=2 * 64 * 2, opaque=False, dtype="bfloat16")


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


class MambaSpec(FullAttentionSpec):
    """A kind that is not served."""


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


def the_facts(config: Any, caches: Any) -> CacheFacts:
    """Of an engine with one KV cache group."""
    (facts,) = cache_facts(config, caches)
    return facts


def with_draft(*names: str) -> Any:
    """The one group of a drafter whose layers have the model's shape, in the order in which vLLM makes them."""
    return groups(FullAttentionSpec(), names=[*TARGET, *names])


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a version."""
    module = ModuleType("vllm")
    module.__version__ = "9.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    names: Any = ModuleType("vllm.model_executor.models.utils")
    names.extract_layer_index = lambda name: next(int(part) for part in name.split(".") if part.isdigit())
    for package in ("vllm.model_executor", "vllm.model_executor.models"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, names.__name__, names)


def test_a_gpus_blocks_are_rows_that_any_split_can_read() -> None:
    facts = the_facts(configured(tp=2), groups(FullAttentionSpec()))
    assert facts == ROWS
    spec = model_spec(SETTINGS, configured(tp=2), facts)
    assert spec == model_spec(SETTINGS, configured(tp=1), replace(facts, head_count=8, block_tokens=32))
    assert (spec.payload, spec.group.kv_heads, spec.group.head_dim) == (PayloadKind.CANONICAL, 8, 64)


def test_a_cpus_blocks_are_shared_by_like_engines_only() -> None:
    facts = replace(ROWS, opaque=True, isa="vec")
    spec = model_spec(SETTINGS, configured(), facts)
    assert spec.opaque is not None
    assert (spec.opaque.isa, spec.opaque.block_tokens, spec.opaque.cell_bytes) == ("vec", 16, 16 * 256)
    assert "9.9" in spec.opaque.layout_id
    for other in (replace(facts, isa="amx"), replace(facts, block_tokens=32)):
        assert model_spec(SETTINGS, configured(), other) != spec


def hybrid(*kinds: Any, layers: str = "01010101") -> Any:
    """KV cache groups of a model of 8 layers, each in the group that its digit numbers."""
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(
                kv_cache_spec=kind,
                layer_names=[name for name, at in zip(TARGET, layers, strict=True) if at == str(number)],
            )
            for number, kind in enumerate(kinds)
        ]
    )


WINDOW = SlidingWindowSpec(sliding_window=128)


def test_each_group_of_layers_is_a_keyspace_of_its_own() -> None:
    config = configured(tp=2)
    windows, full, others = cache_facts(config, hybrid(WINDOW, FullAttentionSpec(), WINDOW, layers="01201200"))
    assert [facts.layer_numbers for facts in (windows, full, others)] == [(0, 3, 6, 7), (1, 4), (2, 5)]
    assert [facts.window_tokens for facts in (windows, full, others)] == [128, 0, 128]
    specs = [model_spec(SETTINGS, config, facts) for facts in (windows, full, others)]
    assert [spec.group.layers for spec in specs] == [4, 2, 2]
    assert [spec.group.attention.name for spec in specs] == ["SLIDING_WINDOW", "FULL", "SLIDING_WINDOW"]
    again = model_spec(SETTINGS, config, replace(others, layer_numbers=(2, 6)))
    assert len({spec.salt for spec in (*specs, again)}) == 4, "layers of equal shape have other KV"
    names = [keyspace_name(SETTINGS, spec, facts) for spec, facts in zip(specs, (windows, full, others), strict=True)]
    assert [name.rpartition("-")[2] for name in names] == ["layer0", "layer1", "layer2"]


def test_windows_alone_are_one_keyspace() -> None:
    config = configured(tp=2)
    facts = the_facts(config, groups(WINDOW))
    spec = model_spec(SETTINGS, config, facts)
    assert (spec.group.layers, spec.group.window_tokens) == (8, 128)
    assert spec != model_spec(SETTINGS, config, the_facts(config, groups(FullAttentionSpec())))


def test_windows_that_vllm_promotes_keep_all_tokens() -> None:
    facts = the_facts(configured(tp=2), groups(FullAttentionSpec(sliding_window=128)))
    assert facts == ROWS


@pytest.mark.parametrize(
    ("caches", "names"),
    [
        (hybrid(WINDOW, MambaSpec()), "2 KV cache groups is of MambaSpec"),
        (hybrid(WINDOW, FullAttentionSpec(head_size=128)), "4 KV heads x 128 elements"),
        (hybrid(WINDOW, FullAttentionSpec(num_kv_heads=2)), "2 KV heads x 64 elements"),
        (hybrid(WINDOW, FullAttentionSpec(page_size_padded=1 << 20)), "equal ones"),
        (hybrid(WINDOW, FullAttentionSpec(), layers="0101010x"), "7 layers have KV of their own, the model has 8"),
    ],
)
def test_groups_that_cannot_be_shared_are_named(caches: Any, names: str) -> None:
    with pytest.raises(GeometryUnsupported, match=names):
        cache_facts(configured(tp=2), caches)


def test_groups_beside_a_drafter_or_a_pipeline_are_named() -> None:
    caches = hybrid(WINDOW, FullAttentionSpec())
    with pytest.raises(GeometryUnsupported, match="2 KV cache groups and a drafter"):
        cache_facts(configured(tp=2, drafter=a_drafter()), caches)
    config = configured(tp=2)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(GeometryUnsupported, match="2 KV cache groups and a pipeline"):
        cache_facts(config, caches)


def test_mla_is_one_latent() -> None:
    facts = replace(ROWS, head_count=1, row_bytes=576 * 2)
    assert model_spec(SETTINGS, configured(mla=True), facts).group.latent_dim == 576


def test_whatever_changes_the_kv_changes_the_keyspace() -> None:
    one = model_spec(SETTINGS, configured(), ROWS)
    assert model_spec(SETTINGS, configured(quantization="fp8"), ROWS) != one
    assert model_spec(replace(SETTINGS, salt="other"), configured(), ROWS) != one
    assert model_spec(replace(SETTINGS, model_revision="r2"), configured(), ROWS) != one
    assert model_spec(SETTINGS, configured(load_format="dummy"), ROWS) != one  # a benchmark's weights under a real name
    assert model_spec(SETTINGS, configured(overrides={"vision_config": {"patch_size": 16}}), ROWS) != one
    by_function = model_spec(SETTINGS, configured(overrides=lambda config: config), ROWS)
    assert by_function == model_spec(SETTINGS, configured(overrides=lambda config: config), ROWS) != one
    changed = configured(overrides=lambda config: config, text_config={"rms_norm_eps": 1e-3})  # the same name, too
    assert model_spec(SETTINGS, changed, ROWS) != by_function


def test_a_salt_never_equals_what_else_changes_the_kv() -> None:
    made_up = model_spec(SETTINGS, configured(load_format="dummy"), ROWS)
    assert model_spec(replace(SETTINGS, salt="made-up weights"), configured(), ROWS) != made_up


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def salt_of(rope: dict[str, Any], **configuration: Any) -> bytes:
    return model_spec(SETTINGS, configured(text_config={"rope_parameters": rope}, **configuration), ROWS).salt


@pytest.mark.parametrize("rope", [LONGROPE, {"full_attention": LONGROPE}])
def test_engines_share_longrope_on_the_same_side_of_its_threshold_only(rope: dict[str, Any]) -> None:
    short = salt_of(rope, max_model_len=4096)
    assert short == salt_of(rope, max_model_len=2048)
    long = salt_of(rope, max_model_len=4097)
    assert long == salt_of(rope, max_model_len=131072) != short


def test_a_longrope_engine_that_fitted_its_length_to_memory_shares_with_its_like() -> None:
    # The model was built before its length was fitted: which factors it took cannot be seen any more.
    fitted = salt_of(LONGROPE, max_model_len=2048, fitted=True)
    assert fitted == salt_of(LONGROPE, max_model_len=3000, fitted=True)
    assert fitted not in (salt_of(LONGROPE, max_model_len=2048), salt_of(LONGROPE, max_model_len=8192))


def test_a_longrope_threshold_may_stand_beside_the_rope() -> None:
    def salt(max_model_len: int) -> bytes:
        config = {"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}
        return model_spec(SETTINGS, configured(text_config=config, max_model_len=max_model_len), ROWS).salt

    assert salt(4096) == salt(1024) != salt(8192)


@pytest.mark.parametrize(
    ("rope", "same"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, True),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, True),
        ({"rope_type": "dynamic", "alpha": 1000.0}, True),
        ({"rope_type": "dynamic", "factor": 2.0, "max_trained_positions": 4096}, False),
        ({"rope_type": "default", "use_fope": True}, False),
        ({"rope_type": "default", "use_fope": True, "num_inv_freq": 32}, True),
    ],
)
def test_the_length_of_requests_counts_where_the_rope_depends_on_it(rope: dict[str, Any], same: bool) -> None:
    assert (salt_of(rope, max_model_len=2048) == salt_of(rope, max_model_len=8192)) is same


def test_what_a_model_writes_into_its_config_as_it_is_built_does_not_part_workers_from_the_scheduler() -> None:
    scheduler, worker = configured(), configured(text_config={"max_model_len": 4096})
    assert model_spec(SETTINGS, scheduler, ROWS) == model_spec(SETTINGS, worker, ROWS)


EAGLE = "model.layers.8.self_attn.attn"
MTP = "model.layers.8.mtp_block.self_attn.mla_attn"
OWN_NUMBERS = "mtp.layers.0.self_attn.attn"


@pytest.mark.parametrize("draft", [EAGLE, MTP, OWN_NUMBERS])
def test_a_drafters_layers_come_behind_the_models(draft: str) -> None:
    config, cache = configured(drafter=a_drafter()), with_draft(draft)
    facts = the_facts(config, cache)
    spec = model_spec(SETTINGS, config, facts)
    assert (facts.draft_layers, spec.group.layers) == (1, 9)
    assert part_of_rank(spec, config, 0).layers == range(9)
    shuffled = {name: object() for name in sorted([*TARGET, draft], reverse=True)}
    assert layer_order(shuffled, cache.kv_cache_groups[0], 9, 1) == [*TARGET, draft]


def test_layers_that_are_not_one_tensor_each_are_refused() -> None:
    group = with_draft(EAGLE).kv_cache_groups[0]
    with pytest.raises(GeometryUnsupported, match="8 KV tensors"):
        layer_order(TARGET, group, 9, 1)
    with pytest.raises(GeometryUnsupported, match="in 8 layers, 9 were expected"):
        layer_order([*TARGET, "other.layers.0.attn"], group, 9, 0)


def test_mla_with_mtp() -> None:
    drafter = a_drafter("mtp", model="org/model", use_mla=True)
    config = configured(mla=True, drafter=drafter)
    latent = FullAttentionSpec(num_kv_heads=1, head_size=576, head_size_v=0, page_size_bytes=16 * 576 * 2)
    facts = the_facts(config, groups(latent, names=[*TARGET, MTP]))
    group = model_spec(SETTINGS, config, facts).group
    assert (group.layers, group.latent_dim, facts.volatile_tokens) == (9, 576, 1)


def test_engines_with_other_drafters_or_none_do_not_mix() -> None:
    def spec(cache: Any, drafter: Any) -> Any:
        config = configured(drafter=drafter)
        return model_spec(SETTINGS, config, the_facts(config, cache))

    alone, one = spec(groups(FullAttentionSpec()), None), spec(with_draft(EAGLE), a_drafter())
    assert one == spec(with_draft(EAGLE), a_drafter())
    later = a_drafter(hf_config=SimpleNamespace(_commit_hash="d2"))
    others = [
        spec(with_draft(EAGLE), later),
        spec(with_draft(EAGLE), a_drafter("eagle")),
        spec(with_draft(EAGLE), a_drafter(quantization="fp8")),
        spec(with_draft(EAGLE, "model.layers.9.self_attn.attn"), a_drafter()),
    ]
    assert len({alone.salt, one.salt, *(other.salt for other in others)}) >= len(others) + 1
    assert all(other != one for other in (alone, *others))
    assert spec(groups(FullAttentionSpec()), a_drafter("ngram")) == alone  # without KV, whatever it guesses
    assert spec(groups(FullAttentionSpec()), a_drafter("mtp")) == alone  # reads the model's own KV


def test_what_a_drafter_writes_into_its_config_does_not_part_workers_from_the_scheduler() -> None:
    drafter = a_drafter()
    config = configured(drafter=drafter)
    facts = the_facts(config, with_draft(EAGLE))
    scheduler = model_spec(SETTINGS, config, facts)
    drafter.draft_model_config.hf_text_config.to_dict().update(draft_vocab_size=32000, target_layer_count=8)
    assert model_spec(SETTINGS, config, facts) == scheduler


def test_a_chain_of_mtp_modules_leaves_more_tokens_that_may_change() -> None:
    config = configured(drafter=a_drafter("mtp", modules=3))
    assert the_facts(config, with_draft(MTP)).volatile_tokens == 3


@pytest.mark.parametrize(
    ("drafter", "cache", "names"),
    [
        (a_drafter(kv_heads=4), with_draft(EAGLE), "4 KV heads x 64 elements, the model 8 x 64"),
        (a_drafter("draft_model"), with_draft(EAGLE), "draft_model"),
        (a_drafter("dflash"), with_draft(EAGLE), "dflash"),
        (a_drafter(), groups(FullAttentionSpec(), names=TARGET[:7]), "7 layers have KV"),
    ],
)
def test_drafters_that_are_not_served_are_named(drafter: Any, cache: Any, names: str) -> None:
    with pytest.raises(GeometryUnsupported, match=names):
        the_facts(configured(drafter=drafter), cache)


def test_a_drafter_beside_a_pipeline_is_named() -> None:
    config = configured(drafter=a_drafter())
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(GeometryUnsupported, match="pipeline"):
        the_facts(config, with_draft(EAGLE))


def test_a_drafters_weights_must_be_known_before_anything_is_shared() -> None:
    config = configured(drafter=a_drafter(hf_config=SimpleNamespace(_commit_hash=None)))
    facts = the_facts(config, with_draft(EAGLE))
    assert model_spec(SETTINGS, config, facts, read_weights=False).group.layers == 9
    with pytest.raises(InvalidRequest, match="org/drafter"):
        model_spec(SETTINGS, config, facts)


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        ([MambaSpec()], "MambaSpec"),
        ([FullAttentionSpec(attention_chunk_size=128)], "chunked local"),
        ([SlidingWindowSpec(sliding_window=128, extra_retained_tokens=2)], "drafter .* sliding windows"),
        ([FullAttentionSpec(dtype=torch.uint8)], "uint8"),
        ([FullAttentionSpec(page_size_bytes=1001)], "1001 bytes"),
        ([FullAttentionSpec(non_causal=True)], "later ones"),
        ([FullAttentionSpec(num_kv_heads=2, num_head_slots=2)], "2 slots for 2 KV heads"),
        ([FullAttentionSpec(num_head_slots=2)], "2 slots for 4 KV heads"),
        ([FullAttentionSpec(tokens_per_state=4)], "4 tokens"),
        ([FullAttentionSpec(head_size_v=128)], "V 128"),
    ],
)
def test_what_cannot_be_shared_is_named(specs: list[Any], names: str) -> None:
    with pytest.raises(GeometryUnsupported, match=names):
        the_facts(configured(), groups(*specs))


FP8_PER_TENSOR, PER_TOKEN_HEAD = 1, 3  # of vLLM's KVQuantMode


def fp8_blocks(**values: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **({"dtype": torch.uint8, "page_size_bytes": 16 * 4 * 2 * 64, "kv_quant_mode": FP8_PER_TENSOR} | values)
    )


@pytest.mark.parametrize(
    ("cache_dtype", "dtype"),
    [
        ("fp8", Dtype.FP8_E4M3),
        ("fp8_e4m3", Dtype.FP8_E4M3),
        ("auto", Dtype.FP8_E4M3),  # of a checkpoint whose scheme vLLM follows while it builds the model
        ("fp8_e5m2", Dtype.FP8_E5M2),
    ],
)
def test_fp8_caches_are_bytes_whose_scales_are_the_checkpoints(cache_dtype: str, dtype: Dtype) -> None:
    config = configured(cache_dtype=cache_dtype)
    facts = the_facts(config, groups(fp8_blocks()))
    assert facts.row_bytes == 2 * 64
    spec = model_spec(SETTINGS, config, facts)
    assert (spec.dtype, spec.engine_row_bytes, spec.codec) == (dtype, 64, Codec.RAW)
    assert spec.salt != model_spec(SETTINGS, configured(), ROWS).salt
    assert "fp8" in keyspace_name(SETTINGS, spec, ROWS)


def test_two_names_of_one_element_type_share() -> None:
    specs = [
        model_spec(SETTINGS, config, the_facts(config, groups(fp8_blocks())))
        for config in (configured(cache_dtype="fp8"), configured(cache_dtype="fp8_e4m3"))
    ]
    assert specs[0] == specs[1]
    assert model_spec(SETTINGS, configured(cache_dtype="bfloat16"), ROWS) == model_spec(SETTINGS, configured(), ROWS)


def test_an_mla_latent_in_fp8() -> None:
    config = configured(mla=True, cache_dtype="fp8")
    latent = {"num_kv_heads": 1, "head_size": 576, "head_size_v": 0, "page_size_bytes": 16 * 576}
    facts = the_facts(config, groups(fp8_blocks(**latent, cache_dtype_str="fp8")))
    assert model_spec(SETTINGS, config, facts).group.latent_dim == 576


@pytest.mark.parametrize(
    ("config", "spec", "names"),
    [
        ({"cache_dtype": "fp8", "calculate_kv_scales": True}, {}, "calculate_kv_scales"),
        ({"cache_dtype": "fp8_per_token_head"}, {"kv_quant_mode": PER_TOKEN_HEAD}, "fp8_per_token_head"),
        ({"cache_dtype": "nvfp4"}, {"kv_quant_mode": 5}, "nvfp4"),
        ({"cache_dtype": "fp8_ds_mla"}, {"cache_dtype_str": "fp8_ds_mla"}, "fp8_ds_mla"),
        ({"cache_dtype": "fp8_inc"}, {"dtype": torch.float8_e4m3fn}, "fp8_inc"),
    ],
)
def test_caches_whose_scales_are_each_engines_own_are_named(
    config: dict[str, Any], spec: dict[str, Any], names: str
) -> None:
    with pytest.raises(GeometryUnsupported, match=names):
        the_facts(configured(**config), groups(fp8_blocks(**spec)))


def test_other_devices_are_named() -> None:
    with pytest.raises(GeometryUnsupported, match="xpu"):
        the_facts(configured(device="xpu"), groups(FullAttentionSpec()))


def test_context_parallelism_is_named() -> None:
    for ways in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        config = configured()
        setattr(config.parallel_config, ways, 2)
        with pytest.raises(GeometryUnsupported, match="context parallelism"):
            the_facts(config, groups(FullAttentionSpec()))


def test_chunks_are_whole_blocks() -> None:
    with pytest.raises(InvalidRequest, match="block size 256"):
        model_spec(SETTINGS, configured(), replace(ROWS, block_tokens=256))


def test_weights_are_known_by_commit_or_by_content(tmp_path: Path) -> None:
    hub = SimpleNamespace(model="org/model", hf_config=SimpleNamespace(_commit_hash="c0ffee"))
    assert model_revision(hub) == "c0ffee"
    weights = {"layer": torch.arange(8.0)}
    save_file(weights, tmp_path / "model.safetensors")
    local = SimpleNamespace(model=str(tmp_path), hf_config=SimpleNamespace(_commit_hash=None))
    first = model_revision(local)
    save_file({"layer": weights["layer"] + 1}, tmp_path / "model.safetensors")
    assert model_revision(local) != first
    with pytest.raises(InvalidRequest, match="model_revision"):
        model_revision(SimpleNamespace(model="org/unknown", hf_config=SimpleNamespace()))


def test_ranks_share_out_heads_and_doubled_ones_only_load() -> None:
    spec = model_spec(SETTINGS, configured(), ROWS)
    assert [part_of_rank(spec, configured(tp=2), rank).heads for rank in range(2)] == [range(4), range(4, 8)]
    doubled = [part_of_rank(spec, configured(tp=16), rank) for rank in range(2)]
    assert [(part.heads, part.load_only) for part in doubled] == [(range(1), False), (range(1), True)]


def test_degrees_that_the_grid_cannot_serve_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model_spec(SETTINGS, configured(), ROWS)
    check_ranks(spec, configured(tp=4))
    with pytest.raises(PartitionRefused, match="3 TP ranks x 1 pipeline stages"):
        check_ranks(spec, configured(tp=3))
    stages: Any = ModuleType("vllm.distributed.utils")
    stages.get_pp_indices = lambda layers, stage, count: (stage * layers // count, (stage + 1) * layers // count)
    monkeypatch.setitem(sys.modules, "vllm.distributed", ModuleType("vllm.distributed"))
    monkeypatch.setitem(sys.modules, stages.__name__, stages)
    config = configured()
    config.parallel_config.pipeline_parallel_size = 2  # eight layers of this size are one layer group
    with pytest.raises(PartitionRefused, match=r"1 TP ranks x 2 pipeline stages.*grid of 1 layer groups"):
        check_ranks(spec, config)


def test_a_name_is_one_that_the_index_takes() -> None:
    spec = model_spec(replace(SETTINGS, model_id="Org/" + "long model@name " * 9), configured(), ROWS)
    name = keyspace_name(SETTINGS, spec, ROWS)
    assert re.fullmatch(r"[A-Za-z0-9._:/-]{1,128}", name)
    assert keyspace_name(replace(SETTINGS, keyspace_name="chat"), spec, ROWS) == "chat"
