"""Prompts with images are never shared: lightllm numbers the tokens of an image by the order in which images come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.connectors.contrib.lightllm.client import CpuKvCacheClient
from kvpool.connectors.contrib.lightllm.settings import FIRST_IMAGE_TOKEN, vocabulary_of
from tests.fixtures.lightllm_caches import settings_of


class Owner:
    """Of an opened keyspace."""

    def call(self, name: str, *arguments: Any) -> Any:
        assert name == "hash_key"
        return "ab" * 32


def a_client(directory: Path, **settings: Any) -> Any:
    given = {"index_endpoints": ["127.0.0.1:1"], "pagestore": "unix:/nowhere"}
    client = CpuKvCacheClient(True, False, settings=settings_of(directory, given, **settings))
    vars(client)["_calls"] = Owner()
    return client


TEXT = list(range(129))


@pytest.mark.parametrize("make", [list, np.array])
def test_a_prompt_with_ids_beyond_the_vocabulary_has_no_pages(
    tmp_path: Path, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = a_client(tmp_path)
    assert len(client.compute_token_list_hash(make(TEXT), 64)) == 2
    for first in (FIRST_IMAGE_TOKEN, 1 << 40):
        image = list(range(first, first + 64))
        assert client.compute_token_list_hash(make(TEXT[:64] + image + TEXT[64:]), 64) == []
    assert caplog.text.count("image") == 1


def test_the_vocabulary_of_the_model_is_the_limit_where_it_is_known(tmp_path: Path) -> None:
    client = a_client(tmp_path, vocabulary=128)
    assert client.compute_token_list_hash(TEXT, 64) == []
    assert len(client.compute_token_list_hash(TEXT[:128], 64)) == 1


@pytest.mark.parametrize(
    ("config", "vocabulary"),
    [
        ({"vocab_size": 32000}, 32000),
        ({"vocab_size": 32000, "text_config": {"vocab_size": 152064}}, 152064),
        ({"thinker_config": {"text_config": {"vocab_size": 152064}}}, 152064),
        ({"vocab_size": "many"}, FIRST_IMAGE_TOKEN),
        ({"vocab_size": 1 << 40}, FIRST_IMAGE_TOKEN),
        (None, FIRST_IMAGE_TOKEN),
    ],
)
def test_the_vocabulary_is_read_from_the_models_directory(tmp_path: Path, config: Any, vocabulary: int) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocabulary_of(str(tmp_path)) == vocabulary
