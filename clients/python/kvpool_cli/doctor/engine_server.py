"""An OpenAI-compatible server: it tokenizes, completes, and says where cached tokens came from. Blocking."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvpool_cli.errors import CommandFailed, UsageFailed
from kvpool_cli.prompts import tokenized_by_server
from kvpool_cli.server_calls import ServerRefused, check_api_key, fetch

_TIMEOUT_S = 120.0
_METRICS_TIMEOUT_S = 10.0
_ANSWER_BYTES_MAX = 16 << 20
_UNAUTHORIZED = (401, 403)
# vLLM's counters, in tokens: served by its KV connector, and by its own prefix cache.
CONNECTOR_HITS = "vllm:external_prefix_cache_hits_total"
_OWN_HITS = "vllm:prefix_cache_hits_total"
_PROCESS_START = "process_start_time_seconds"


class Source(Enum):
    """Where at least some of the cached tokens of an answer came from."""

    CONNECTOR = auto()
    OWN_CACHE = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Cached tokens that a server counted while it made an answer, for this and for other requests."""

    connector_tokens: int
    own_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A continuation.

    tokens: ids, or the text where the server returns no ids. cached_tokens: None if not reported. hits: None if the
    server does not count them.
    """

    tokens: tuple[int | str, ...]
    cached_tokens: int | None
    hits: Hits | None = None

    @property
    def source(self) -> Source:
        """Where its cached tokens came from, if the counters prove it: fewer hits than those did not serve them all."""
        cached_tokens = self.cached_tokens or 0
        if self.hits is not None and self.hits.connector_tokens < cached_tokens:
            return Source.OWN_CACHE
        if self.hits is not None and self.hits.own_tokens < cached_tokens:
            return Source.CONNECTOR
        return Source.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    name: str
    is_of_vllm: bool


class EngineServer:
    """A server by its URL, with or without /v1. api_key: empty for none."""

    def __init__(self, url: str, api_key: str = "") -> None:
        if not url.lower().startswith(("http://", "https://")):
            raise UsageFailed(f"{url} wants http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._api_key = check_api_key(api_key)
        self._model: _Model | None = None  # not asked yet

    def __str__(self) -> str:
        return self.url

    def tokenize(self, text: str) -> list[int]:
        """Special tokens as for a completion."""
        return tokenized_by_server(self.url, text, self._api_key)

    def complete(self, prompt: Sequence[int], output_tokens: int, kvpool: Mapping[str, Any]) -> Answer:
        """Greedy tokens after these. Raises CommandFailed.

        kvpool: options of the request for kvpool's connector in vLLM. vLLM accepts them without it; other engines may
        refuse a request with a field that they do not know, and do not get them.
        """
        address = f"{self.url}/v1/completions"
        model = self._first_model()
        body = {
            "model": model.name,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if model.is_of_vllm:
            body["kv_transfer_params"] = {"kvpool": dict(kvpool)}
        before = self._metrics()
        document = self._call(address, body)
        hits = _hits(before, self._metrics())
        try:
            choice, usage = document["choices"][0], document["usage"]
            details = usage.get("prompt_tokens_details") or {}
            tokens = choice.get("token_ids") or [choice["text"]]
            return Answer(tokens=tuple(tokens), cached_tokens=details.get("cached_tokens"), hits=hits)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CommandFailed(f"{address} does not answer as OpenAI's API does: {error!r}") from error

    def process_start_s(self) -> float | None:
        """When its process started, in seconds since the epoch; None if it does not say."""
        return self._metrics().get(_PROCESS_START)

    def _metrics(self) -> Mapping[str, float]:
        """Finite samples of /metrics by name, those of all its engines together. Empty if it has none."""
        address = f"{self.url}/metrics"
        samples: dict[str, float] = {}
        try:
            text = fetch(
                address, api_key=self._api_key, timeout_s=_METRICS_TIMEOUT_S, size_bytes_max=_ANSWER_BYTES_MAX
            ).decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if math.isfinite(sample.value):
                        samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
        except (CommandFailed, ValueError):
            return {}
        return samples

    def _first_model(self) -> _Model:
        if self._model is None:
            address = f"{self.url}/v1/models"
            try:
                card = self._call(address)["data"][0]
                self._model = _Model(name=str(card["id"]), is_of_vllm=card.get("owned_by") == "vllm")
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise CommandFailed(f"{address} names no model: {error}") from error
        return self._model

    def _call(self, address: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return json.loads(
                fetch(address, body, api_key=self._api_key, timeout_s=_TIMEOUT_S, size_bytes_max=_ANSWER_BYTES_MAX)
            )
        except ServerRefused as error:
            hint = "; give its API key by OPENAI_API_KEY or --api-key" if error.status in _UNAUTHORIZED else ""
            raise CommandFailed(f"{error}{hint}") from error
        except ValueError as error:
            raise CommandFailed(f"{address} does not answer in JSON: {error}") from error


def _hits(before: Mapping[str, float], after: Mapping[str, float]) -> Hits | None:
    if any(name not in samples for name in (CONNECTOR_HITS, _OWN_HITS) for samples in (before, after)):
        return None
    return Hits(
        connector_tokens=round(after[CONNECTOR_HITS] - before[CONNECTOR_HITS]),
        own_tokens=round(after[_OWN_HITS] - before[_OWN_HITS]),
    )
