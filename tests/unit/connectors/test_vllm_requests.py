"""Chunk hashes of vLLM's requests, and the connector's settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.connectors.vllm.lora_identities import LoraIdentities
from kvpool.connectors.vllm.request_chain import request_chains
from kvpool.connectors.vllm.settings import VllmSettings
from kvpool.core.chunks import chunk_hashes
from kvpool.core.errors import InvalidRequest
from tests.unit.connectors.vllm_fakes import HASH_KEY, FakeConnection, FakeRequest, a_request, image

CHUNK = 16


def hashes(request: FakeRequest, epoch: bytes = b"") -> tuple[bytes, ...]:
    lora = request.lora_request
    adapter = LoraIdentities(FakeConnection(None).start).identity(lora) if lora is not None else None
    return request_chains(request, adapter, [HASH_KEY], CHUNK, epoch=epoch)[0].hashes


def adapter(directory: Path, content: bytes) -> Any:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(content)
    return SimpleNamespace(lora_int_id=1, lora_name=directory.name, lora_path=str(directory))


def test_a_plain_prompt_hashes_as_any_other_engines() -> None:
    assert list(hashes(a_request(70))) == chunk_hashes(HASH_KEY, range(70), CHUNK)


def test_a_chain_grows_as_if_it_had_been_hashed_at_once() -> None:
    request = a_request(40, cache_salt="s", mm_features=[image("a", 30, 40)])
    short = request_chains(request, None, [HASH_KEY], CHUNK)
    request.all_token_ids += range(40, 90)
    assert request_chains(request, None, [HASH_KEY], CHUNK, short)[0].hashes == hashes(request)


def test_salts_and_images_and_their_places_make_other_hashes() -> None:
    requests = [
        a_request(64),
        a_request(64, cache_salt="a"),
        a_request(64, cache_salt="b"),
        a_request(64, mm_features=[image("a", 4, 8)]),
        a_request(64, mm_features=[image("b", 4, 8)]),
        a_request(64, mm_features=[image("a", 5, 8)]),
        a_request(64, mm_features=[image("a", 4, 8), image("b", 12, 4)]),
        a_request(64, mm_features=[image("b", 4, 8), image("a", 12, 4)]),
    ]
    assert len({hashes(request) for request in requests}) == len(requests)
    assert len({hashes(request)[-1] for request in requests}) == len(requests)


def test_an_image_counts_from_its_first_chunk_on() -> None:
    plain, late = hashes(a_request(64)), hashes(a_request(64, mm_features=[image("a", 40, 4)]))
    assert plain[:2] == late[:2]
    assert plain[2:] != late[2:]
    assert not set(plain[2:]) & set(late[2:])


def test_an_adapter_is_its_files_not_its_name(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one", b"x"), adapter(tmp_path / "two", b"x")
    other = adapter(tmp_path / "other", b"y")
    assert hashes(a_request(64, lora_request=one)) == hashes(a_request(64, lora_request=two))
    assert hashes(a_request(64, lora_request=one)) != hashes(a_request(64, lora_request=other))
    assert hashes(a_request(64, lora_request=one)) != hashes(a_request(64))


def test_an_adapter_whose_files_are_not_here_has_no_identity(tmp_path: Path) -> None:
    adapters = LoraIdentities(FakeConnection(None).start)
    unknown = SimpleNamespace(lora_int_id=1, lora_name="n", lora_path="somebody/adapter")
    assert adapters.identity(unknown) is None
    with pytest.raises(InvalidRequest, match="adapter"):
        request_chains(a_request(64, lora_request=unknown), None, [HASH_KEY], CHUNK)


def test_an_adapters_files_are_read_once_and_in_nobodys_way(tmp_path: Path) -> None:
    connection = FakeConnection(None)
    adapters, one = LoraIdentities(connection.start), adapter(tmp_path / "one", b"x")
    connection.held = True
    assert [adapters.identity(one) for _ in range(3)] == [None] * 3
    connection.go()
    identity = adapters.identity(one)
    assert identity is not None
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"y")  # the engine has the first ones still
    assert adapters.identity(one) == identity
    again = SimpleNamespace(**{**vars(one), "lora_int_id": 2})  # until it is loaded again
    assert adapters.identity(again) is None
    connection.go()
    assert adapters.identity(again) not in (None, identity)


def test_an_adapter_that_is_read_anew_each_time_has_no_identity(tmp_path: Path) -> None:
    one = adapter(tmp_path / "one", b"x")
    one.load_inplace = True
    assert LoraIdentities(FakeConnection(None).start).identity(one) is None


def test_an_adapter_that_cannot_be_read_is_said_and_not_shared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> bytes:
        raise PermissionError("planted")

    monkeypatch.setattr("kvpool.connectors.vllm.lora_identities.directory_digest", refuse)
    adapters, one = LoraIdentities(FakeConnection(None).start), adapter(tmp_path / "one", b"x")
    assert [adapters.identity(one) for _ in range(3)] == [None] * 3
    assert caplog.text.count("planted") == 1


def test_only_so_many_adapters_are_remembered(tmp_path: Path) -> None:
    connection = FakeConnection(None)
    adapters = LoraIdentities(connection.start, limit=2)
    many = [adapter(tmp_path / str(number), b"x") for number in range(4)]
    for one in many:
        adapters.identity(one)
    connection.held = True
    assert [adapters.identity(one) is not None for one in reversed(many)] == [True, True, False, False]


def test_an_epoch_makes_all_hashes_its_own() -> None:
    plain, first = hashes(a_request(64)), hashes(a_request(64), epoch=b"1")
    assert not set(plain) & set(first)
    assert not set(first) & set(hashes(a_request(64), epoch=b"2"))


def test_settings_take_what_json_has() -> None:
    settings = VllmSettings.of({"agent": "unix:/a", "load_timeout_s": 3, "store": "prefill", "chunk_tokens": 256})
    assert settings.load_timeout_s == 3.0
    assert settings.chunk_tokens == 256


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ({}, "agent"),
        ({"agent": "unix:/a", "chunk_token": 5}, "chunk_token"),
        ({"agent": "unix:/a", "chunk_tokens": "5"}, "chunk_tokens"),
        ({"agent": "unix:/a", "chunk_tokens": 100}, "chunk_tokens"),
        ({"agent": "unix:/a", "store": "now"}, "store"),
        ({"agent": "unix:/a", "kv_cache_layout": "NHD"}, "kv_cache_layout"),
        ({"agent": "unix:/a", "store_generated": 1}, "store_generated"),
        ({"agent": "unix:/a", "load_timeout_s": -1}, "load_timeout_s"),
        ({"agent": "unix:/a", "load_timeout_s": True}, "load_timeout_s"),
    ],
)
def test_settings_refuse_what_they_do_not_know(extra: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequest, match=names):
        VllmSettings.of(extra)


def test_a_role_leaves_out_loads_or_stores() -> None:
    settings = VllmSettings(agent="unix:/a", store="prefill")
    assert settings.limited(loads=True, stores=True) == settings
    assert settings.limited(loads=False, stores=True).load == "never"
    assert settings.limited(loads=True, stores=False).store == "never"
