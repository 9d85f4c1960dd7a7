"""An OpenAI-compatible server of an engine: it tokenizes and completes. Blocking."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool_cli.errors import CommandFailed, UsageFailed
from kvpool_cli.prompts import tokenized_by_server
from kvpool_cli.server_calls import ServerRefused, check_api_key, fetch

_TIMEOUT_S = 120.0
_ANSWER_BYTES_MAX = 16 << 20
_UNAUTHORIZED = (401, 403)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A continuation. tokens: ids, or the text where the server returns no ids; cached_tokens: None if not reported."""

    tokens: tuple[int | str, ...]
    cached_tokens: int | None


class EngineServer:
    """A server by its URL, with or without /v1. api_key: empty for none."""

    def __init__(self, url: str, api_key: str = "") -> None:
        if not url.lower().startswith(("http://", "https://")):
            raise UsageFailed(f"{url} wants http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._api_key = check_api_key(api_key)
        self._model = ""  # not asked yet

    def __str__(self) -> str:
        return self.url

    def tokenize(self, text: str) -> list[int]:
        """Special tokens as for a completion."""
        return tokenized_by_server(self.url, text, self._api_key)

    def complete(self, prompt: Sequence[int], output_tokens: int) -> Answer:
        """Greedy tokens after these. Raises CommandFailed."""
        address = f"{self.url}/v1/completions"
        body = {
            "model": self._first_model(),
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        document = self._call(address, body)
        try:
            choice, usage = document["choices"][0], document["usage"]
            details = usage.get("prompt_tokens_details") or {}
            tokens = choice.get("token_ids") or [choice["text"]]
            return Answer(tokens=tuple(tokens), cached_tokens=details.get("cached_tokens"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CommandFailed(f"{address} does not answer as OpenAI's API does: {error!r}") from error

    def _first_model(self) -> str:
        if not self._model:
            address = f"{self.url}/v1/models"
            try:
                self._model = str(self._call(address)["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
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
