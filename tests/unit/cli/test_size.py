"""`kvpool size` from a model's own config and from numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpool.core.model import ENGINE_CHUNK_TOKENS
from kvpool_cli.main import run_command as main
from kvpool_pagestore.config import PageStoreConfig

LLAMA_8B = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
DEEPSEEK_V3 = {"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["size", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["size", *arguments]) == 1
    return capsys.readouterr().err


def written(directory: Path, config: object) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_a_models_config_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = ask(capsys, written(tmp_path, LLAMA_8B), "--arena-bytes", "64GiB", "--disk-bytes", "1TiB")
    assert document["geometry"] == {"layers": 32, "kv_heads": 8, "head_dim": 128, "latent_dim": 0}
    assert document["token_bytes"] == 131072
    assert (document["chunk"]["pages"], document["chunk"]["tp_degrees"]) == (2, [1, 2, 4, 8])
    assert document["chunk"]["tokens"] == ENGINE_CHUNK_TOKENS
    assert document["staging"] == {"capacity_bytes": 64 << 30, "segment_bytes": 1 << 30, "tokens": 520_192}
    assert document["disk"]["tokens"] == 7_995_392
    assert ask(capsys, written(tmp_path, {"text_config": LLAMA_8B}))["token_bytes"] == 131072
    assert ask(capsys, written(tmp_path, DEEPSEEK_V3))["geometry"]["latent_dim"] == 576


@pytest.mark.parametrize("arena", ["256MiB", "1GiB", "5GiB", "1TiB"])
def test_segments_are_those_that_the_pagestore_makes(arena: str, capsys: pytest.CaptureFixture[str]) -> None:
    staging = ask(capsys, "--layers", "2", "--latent-dim", "64", "--arena-bytes", arena)["staging"]
    config = PageStoreConfig(data_dir=Path("data"), arena_bytes=staging["capacity_bytes"])
    assert staging["segment_bytes"] == config.prepared_bytes


def test_numbers_say_it_and_count_before_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--layers", "80", "--kv-heads", "8", "--head-dim", "128")
    assert ask(capsys, *flags)["token_bytes"] == 327_680
    assert ask(capsys, written(tmp_path, LLAMA_8B), "--layers", "16")["token_bytes"] == 65_536
    assert ask(capsys, "--layers", "61", "--latent-dim", "576", "--codec", "fp8-e4m3")["token_bytes"] < 61 * 576 * 1.1


def test_people_read_it_in_a_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--layers", "61", "--latent-dim", "576"]) == 0
    out = capsys.readouterr().out
    assert "token    68.6 KiB" in out and "any: rank 0 stores, all load" in out
    assert main(["size", "--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--segment-bytes", "1MiB"]) == 0
    assert "does not fit a segment" in capsys.readouterr().out


def test_what_is_missing_or_not_served_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--kv-heads" in refused(capsys, "--layers", "32")
    assert "num_hidden_layers" in refused(capsys, written(tmp_path, {}))
    hybrid = LLAMA_8B | {"layer_types": ["full_attention", "sliding_attention"]}
    assert "sliding_attention" in refused(capsys, written(tmp_path, hybrid))
    assert "not a config.json" in refused(capsys, written(tmp_path, []))
    assert "cannot be read" in refused(capsys, str(tmp_path / "absent.json"))
    assert "chunk_tokens" in refused(capsys, written(tmp_path, LLAMA_8B), "--chunk-tokens", "100")
