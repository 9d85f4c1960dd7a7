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
    KvCacheInfo,
    check_ranks,
    keyspace_name,
    kv_cache_infos,
    model_revision,
    model_spec,
    part_of_rank,
    recurrent_block_tokens,
)
from kvpool.core.errors import GeometryUnsupported, InvalidRequest, PartitionRefused
from kvpool.core.geometry import AttentionKind, PayloadKind
from kvpool.core.keyspace import Codec, Dtype
from tests.unit.connectors.vllm_configs import (
    SETTINGS,
    TARGET,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    a_drafter,
    configured,
    groups,
    install_vllm,
    the_facts,
)

ROWS = KvCacheInfo(block_tokens=16, head_count=4, row_bytes=2 * 64 * 2, opaque=False, dtype="bfloat16")


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a version."""
    install_vllm(monkeypatch)


def test_a_gpus_blocks_are_rows_that_any_split_can_read() -> None:
    facts = the_facts(configured(tp=2), groups(FullAttentionSpec()))
    assert facts == ROWS
    spec = model_spec(SETTINGS, configured(tp=2), facts)
    assert spec == model_spec(SETTINGS, configured(tp=1), replace(facts, head_count=8, block_tokens=32))
    assert (spec.payload, spec.group.kv_heads, spec.group.head_dim) == (PayloadKind.CANONICAL, 8, 64)


@pytest.mark.parametrize(("computed", "isa"), [(torch.bfloat16, "amx"), (torch.float32, "vec")])
def test_a_cpus_kernels_are_those_of_the_models_elements_not_of_its_caches(
    monkeypatch: pytest.MonkeyPatch, computed: torch.dtype, isa: str
) -> None:
    """A cache in fp8 that bfloat16 kernels have filled is arranged as theirs, in tiles where the CPU has them."""
    kernels: Any = ModuleType("vllm.v1.attention.backends.cpu_attn")
    kernels._get_attn_isa = lambda dtype, block, head=None: "amx" if dtype is torch.bfloat16 else "vec"
    for package in ("vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    config = configured(device="cpu", cache_dtype="fp8")
    config.model_config.dtype = computed
    cache = FullAttentionSpec(dtype=torch.uint8, kv_quant_mode=1, page_size_bytes=16 * 4 * 2 * 64)
    assert the_facts(config, groups(cache)).isa == isa


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
    windows, full, others = kv_cache_infos(config, hybrid(WINDOW, FullAttentionSpec(), WINDOW, layers="01201200"))
    assert [facts.layer_numbers for facts in (windows, full, others)] == [(0, 3, 6, 7), (1, 4), (2, 5)]
    assert [facts.window_tokens for facts in (windows, full, others)] == [128, 0, 128]
    specs = [model_spec(SETTINGS, config, facts) for facts in (windows, full, others)]
    assert [spec.group.layers for spec in specs] == [4, 2, 2]
    assert [spec.group.attention.name for spec in specs] == ["GROUPED_WINDOW", "FULL", "GROUPED_WINDOW"]
    again = model_spec(SETTINGS, config, replace(others, layer_numbers=(2, 6)))
    assert len({spec.salt for spec in (*specs, again)}) == 4, "layers of equal shape have other KV"
    names = [keyspace_name(SETTINGS, spec, facts) for spec, facts in zip(specs, (windows, full, others), strict=True)]
    assert [name.rpartition("-")[2] for name in names] == ["layer0", "layer1", "layer2"]


def test_windows_alone_are_one_keyspace() -> None:
    config = configured(tp=2)
    facts = the_facts(config, groups(WINDOW))
    spec = model_spec(SETTINGS, config, facts)
    assert (spec.group.layers, spec.group.window_tokens) == (8, 128)
    assert spec.group.attention is AttentionKind.SLIDING_WINDOW
    assert spec != model_spec(SETTINGS, config, the_facts(config, groups(FullAttentionSpec())))


def test_windows_that_vllm_promotes_keep_all_tokens() -> None:
    facts = the_facts(configured(tp=2), groups(FullAttentionSpec(sliding_window=128)))
    assert facts == ROWS


@pytest.mark.parametrize(
    ("caches", "names"),
    [
        (hybrid(WINDOW, ChunkedLocalAttentionSpec()), "2 KV cache groups is of ChunkedLocalAttentionSpec"),
        (hybrid(WINDOW, FullAttentionSpec(head_size=128)), "4 KV heads x 128 elements"),
        (hybrid(WINDOW, FullAttentionSpec(num_kv_heads=2)), "2 KV heads x 64 elements"),
        (hybrid(WINDOW, FullAttentionSpec(page_size_padded=1 << 20)), "equal ones"),
        (hybrid(WINDOW, FullAttentionSpec(), layers="0101010x"), "7 layers have KV of their own, the model has 8"),
    ],
)
def test_groups_that_cannot_be_shared_are_named(caches: Any, names: str) -> None:
    with pytest.raises(GeometryUnsupported, match=names):
        kv_cache_infos(configured(tp=2), caches)


STATE, ATTENTION = MambaSpec(), FullAttentionSpec(block_size=512, page_size_bytes=512 * 4 * 2 * 64 * 2)
STATE_SETTINGS = replace(SETTINGS, chunk_tokens=512)


def test_a_recurrent_state_is_one_piece_that_like_ranks_share() -> None:
    config = configured(tp=2)
    state, full, other = kv_cache_infos(config, hybrid(STATE, ATTENTION, STATE, layers="00210021"))
    assert [facts.layer_numbers for facts in (state, full, other)] == [(0, 1, 4, 5), (3, 7), (2, 6)]
    spec = model_spec(STATE_SETTINGS, config, state)
    assert (spec.group.attention, spec.group.layers, spec.payload) == (AttentionKind.STATE_SPACE, 4, PayloadKind.OPAQUE)
    assert (spec.positions, spec.head_bytes, spec.group.kv_heads) == (1, 3 * 512 * 2 + 4 * 64 * 64 * 4, 2)
    assert [part_of_rank(spec, config, rank).heads for rank in (0, 1)] == [range(1), range(1, 2)]
    assert model_spec(STATE_SETTINGS, config, full).payload is PayloadKind.CANONICAL
    one_rank = configured(tp=1)
    full_heads = FullAttentionSpec(block_size=512, num_kv_heads=8, page_size_bytes=512 * 8 * 2 * 64 * 2)
    of_one, *_ = kv_cache_infos(one_rank, hybrid(STATE, full_heads))
    of_one = replace(of_one, layer_numbers=state.layer_numbers)
    others = [model_spec(STATE_SETTINGS, one_rank, of_one)]
    for changed in ({"shapes": ((512, 3), (4, 64, 64))}, {"dtypes": (torch.bfloat16, torch.bfloat16)}):
        like, *_ = kv_cache_infos(config, hybrid(MambaSpec(**changed), ATTENTION, layers="00110011"))
        others.append(model_spec(STATE_SETTINGS, config, replace(like, layer_numbers=state.layer_numbers)))
    names = [keyspace_name(STATE_SETTINGS, one, state) for one in (spec, *others)]
    assert len(set(others)) == 3
    assert spec not in others
    assert len(set(names)) == 4, "a name is bound to one keyspace"
    assert "-state0-" in names[0]


def test_layers_with_attention_and_a_state_are_in_two_groups() -> None:
    """Falcon H1's; other models have layers with neither."""
    caches = hybrid(STATE, ATTENTION, layers="00000000")
    caches.kv_cache_groups[1].layer_names = [name.replace("self_attn", "attention") for name in TARGET[:6]]
    state, full = kv_cache_infos(configured(tp=2), caches)
    assert (state.layer_numbers, full.layer_numbers) == (tuple(range(8)), tuple(range(6)))
    names = [
        keyspace_name(STATE_SETTINGS, model_spec(STATE_SETTINGS, configured(tp=2), one), one) for one in (state, full)
    ]
    assert len(set(names)) == 2


def test_chunks_of_a_recurrent_state_lie_between_two_checkpoints() -> None:
    state, _ = kv_cache_infos(configured(tp=2), hybrid(STATE, ATTENTION))
    with pytest.raises(InvalidRequest, match="chunk_tokens 128 is not 512"):
        model_spec(SETTINGS, configured(tp=2), state)
    assert recurrent_block_tokens(hybrid(STATE, ATTENTION)) == 512
    assert recurrent_block_tokens(hybrid(WINDOW, FullAttentionSpec())) == 0


@pytest.mark.parametrize(
    ("caches", "cache", "names"),
    [
        (hybrid(MambaSpec(mamba_cache_mode="none"), ATTENTION), {}, "'none'; start with --enable-prefix-caching"),
        (hybrid(STATE, FullAttentionSpec()), {}, r"blocks of \[16, 512\] tokens, .* one --block-size"),
        (hybrid(STATE, ATTENTION), {"prefix_match_unit": 64}, "without --prefix-match-unit"),
        (hybrid(MambaSpec(block_size=528), FullAttentionSpec(block_size=528)), {}, "--block-size 1024"),
        (hybrid(MambaSpec(dtypes=(torch.bfloat16, torch.int8)), ATTENTION), {}, "state is of int8"),
    ],
)
def test_recurrent_states_that_cannot_be_shared_are_named(caches: Any, cache: dict[str, Any], names: str) -> None:
    with pytest.raises(GeometryUnsupported, match=names):
        kv_cache_infos(configured(tp=2, **cache), caches)


def test_recurrent_states_beside_speculation_are_named() -> None:
    with pytest.raises(GeometryUnsupported, match="speculative decoding beside recurrent state"):
        kv_cache_infos(configured(tp=2, drafter=a_drafter("ngram")), hybrid(STATE, ATTENTION))


def test_recurrent_states_under_model_runner_v2_are_served_on_gpus() -> None:
    config = configured(tp=2)
    config.use_v2_model_runner = True
    assert kv_cache_infos(config, hybrid(STATE, ATTENTION))
    config.device_config.device_type = "cpu"
    with pytest.raises(GeometryUnsupported, match=r"on a CPU .* start with VLLM_USE_V2_MODEL_RUNNER=0"):
        kv_cache_infos(config, hybrid(STATE, ATTENTION))


def test_a_vllm_that_does_not_name_its_checkpoints_is_named() -> None:
    del sys.modules["vllm.v1.core.sched"].output.KVConnectorBlockState
    with pytest.raises(GeometryUnsupported, match="does not name the blocks"):
        kv_cache_infos(configured(tp=2), hybrid(STATE, ATTENTION))


def test_groups_beside_a_drafter_or_a_pipeline_are_named() -> None:
    caches = hybrid(WINDOW, FullAttentionSpec())
    with pytest.raises(GeometryUnsupported, match="2 KV cache groups and a drafter"):
        kv_cache_infos(configured(tp=2, drafter=a_drafter()), caches)
    config = configured(tp=2)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(GeometryUnsupported, match="2 KV cache groups and a pipeline"):
        kv_cache_infos(config, caches)


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


@pytest.mark.parametrize("built", ["deepseek_yarn", "deepseek_llama_scaling"])
def test_what_vllm_writes_into_a_config_when_it_builds_the_model_is_not_read(built: str) -> None:
    """Only workers build it: a scheduler in a process of its own has the config as it was."""
    given = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}

    def spec(family: str = "deepseek_v3", overrides: Any = None, **rope: Any) -> Any:
        config = configured(text_config={"model_type": family, "rope_parameters": given | rope}, overrides=overrides)
        return model_spec(SETTINGS, config, ROWS)

    assert spec(rope_type=built) == spec() != spec(factor=20.0)
    users = {"rope_parameters": given | {"rope_type": built}}
    assert spec(rope_type=built, overrides=users) != spec(), "as the user asked for, who may have another model"
    assert spec("llama", rope_type=built) != spec("llama"), "its layers write nothing"


def test_the_turned_share_of_a_head_that_vllm_derives_from_the_config_is_not_read() -> None:
    """As MiniMax M2's, in workers. What the config says of it belongs to the model's revision."""
    sizes: dict[str, Any] = {"rotary_dim": 64, "head_dim": 128, "hidden_size": 512, "num_attention_heads": 4}
    sizes["model_type"] = "minimax_m2"

    def spec(overrides: Any = None, **rope: Any) -> Any:
        text_config = sizes | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6} | rope}
        return model_spec(SETTINGS, configured(text_config=text_config, overrides=overrides), ROWS)

    assert spec() == spec(partial_rotary_factor=0.5) != spec(partial_rotary_factor=0.25)
    assert spec({"rope_parameters": {"partial_rotary_factor": 0.5}}, partial_rotary_factor=0.5) != spec()
    del sizes["head_dim"]  # then it is the width of a head
    assert spec() == spec(partial_rotary_factor=0.5)
    sizes["model_type"] = "llama"  # does not read `rotary_dim`
    assert spec() != spec(partial_rotary_factor=0.5)
    sizes |= {"model_type": "falcon_h1", "attn_rotary_emb": 64}
    del sizes["rotary_dim"]
    assert spec() == spec(partial_rotary_factor=0.5)
    del sizes["attn_rotary_emb"]
    assert spec() != spec(partial_rotary_factor=0.5)


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


DSA = UniformTypeKVCacheSpecs(
    MLAAttentionSpec(num_kv_heads=1, head_size=576),
    MLAAttentionSpec(num_kv_heads=1, head_size=132, dtype=torch.uint8),
)


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        ([ChunkedLocalAttentionSpec()], "ChunkedLocalAttentionSpec"),
        ([DSA], r"unequal KV \(MLAAttentionSpec 1 x 132 uint8, MLAAttentionSpec 1 x 576 bfloat16\), .* indexer"),
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
