"""Which keyspace a vLLM engine's KV belongs to whose drafter has layers of its own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.connectors.vllm.identity import layer_order, model_spec, part_of_rank
from kvpool.core.errors import GeometryUnsupported, InvalidRequest
from tests.unit.connectors.vllm_configs import (
    SETTINGS,
    TARGET,
    FullAttentionSpec,
    a_drafter,
    configured,
    groups,
    install_vllm,
    the_facts,
    with_draft,
)

EAGLE = "model.layers.8.self_attn.attn"
MTP = "model.layers.8.mtp_block.self_attn.mla_attn"
OWN_NUMBERS = "mtp.layers.0.self_attn.attn"


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a version."""
    install_vllm(monkeypatch)


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


def vllms_own(config: Any, target: Any = None) -> Any:
    """What vLLM gives every drafter's config, as SpeculativeConfig.hf_config_override."""
    return config


vllms_own.__module__ = "vllm.config.speculative"


def a_users(config: Any) -> Any:
    return config


@pytest.mark.parametrize("overrides", [vllms_own, partial(vllms_own, target=1)])
def test_what_vllm_writes_into_a_drafters_config_when_it_is_built_is_not_read(overrides: Any) -> None:
    """Only workers build it: a scheduler in a process of its own has the config as it was."""
    drafter = a_drafter(hf_overrides=overrides)
    config = configured(drafter=drafter)
    facts = the_facts(config, with_draft(EAGLE))
    scheduler = model_spec(SETTINGS, config, facts)
    drafter.draft_model_config.hf_text_config.to_dict().update(draft_vocab_size=32000, target_layer_count=8)
    assert model_spec(SETTINGS, config, facts) == scheduler


def test_engines_whose_drafters_configs_differ_do_not_mix() -> None:
    def spec(rope_theta: float = 1e4, overrides: Any = vllms_own, **changed: Any) -> Any:
        text_config = SimpleNamespace(to_dict=lambda: {"rope_parameters": {"rope_theta": rope_theta}, **changed})
        config = configured(drafter=a_drafter(hf_overrides=overrides, hf_text_config=text_config))
        return model_spec(SETTINGS, config, the_facts(config, with_draft(EAGLE)))

    assert spec() == spec()
    users = partial(vllms_own, a_users)
    assert len({spec(), spec(1e6), spec(overrides=users), spec(overrides=users, rms_norm_eps=1e-2)}) == 4


def test_a_drafters_weights_must_be_known_before_anything_is_shared() -> None:
    config = configured(drafter=a_drafter(hf_config=SimpleNamespace(_commit_hash=None)))
    facts = the_facts(config, with_draft(EAGLE))
    assert model_spec(SETTINGS, config, facts, read_weights=False).group.layers == 9
    with pytest.raises(InvalidRequest, match="org/drafter"):
        model_spec(SETTINGS, config, facts)
