"""The two request formats, and what their streamed answers say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

DONE = "[DONE]"
DETAIL_CHARACTERS = 200


class Api(StrEnum):
    """Which call of the server is made."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Below the base URL."""
        return "/v1/completions" if self is Api.COMPLETIONS else "/v1/chat/completions"


class RequestFailed(Exception):
    """One request did not end as it should. kind: a short name that errors are counted by."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = " ".join(detail.split())[:DETAIL_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server counted; cached_tokens is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a streamed answer. Tokens came with it if there is text, token ids or a call of a tool."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    carries_tokens: bool = False
    finished: bool = False
    usage: Usage | None = None


def request_body(prompt: Mapping[str, Any], model: str, output_tokens: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of one request. extra: of the user's, and goes above all but the prompt."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if isinstance(prompt.get("prompt"), list):
        # vLLM: without it an answer to token ids could not become part of the next prompt.
        body["return_token_ids"] = True
    return {**body, **extra, **prompt}


def chunk_from_data(data: str) -> Chunk:
    """What one event says. Raises RequestFailed where it is no chunk, or the error of a server."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestFailed("malformed", f"an event is no JSON: {data[:80]!r}") from error
    if not isinstance(event, dict):
        raise RequestFailed("malformed", f"an event is no object: {data[:80]!r}")
    if event.get("error") or event.get("object") == "error":
        raise RequestFailed("server_error", json.dumps(event.get("error") or event))
    try:
        return _chunk(event)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RequestFailed("malformed", f"an event is no chunk: {data[:80]!r}") from error


def _chunk(event: Mapping[str, Any]) -> Chunk:
    usage = _usage(event.get("usage"))
    choices = event.get("choices") or []
    if not choices:
        return Chunk(usage=usage)
    choice = choices[0]
    delta = choice.get("delta") or {}
    text = _text(choice.get("text")) + _text(delta.get("content"))
    # Reasoning is generated like any other token, and is first to come.
    thought = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
    token_ids = tuple(int(token) for token in choice.get("token_ids") or ())
    return Chunk(
        text=text,
        token_ids=token_ids,
        carries_tokens=bool(text or thought or token_ids or delta.get("tool_calls")),
        finished=choice.get("finish_reason") is not None,
        usage=usage,
    )


def _text(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError("text is no string")
    return value


def _usage(usage: Any) -> Usage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return Usage(
        prompt_tokens=int(usage["prompt_tokens"]),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        cached_tokens=None if cached is None else int(cached),
    )
