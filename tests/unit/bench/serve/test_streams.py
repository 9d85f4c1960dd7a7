"""Event streams and the chunks in them, well formed and not."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.serve.api import Chunk, RequestFailed, Usage, chunk_from_data, request_body
from bench.serve.sse import LINE_BYTES_MAX, EventReader, StreamBroken

STREAM = ': ping\n\ndata: {"a": 1}\n\nevent: x\r\ndata:é\r\ndata: two\r\n\r\ndata: [DONE]\n\n'.encode()


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_come_out_whole_however_their_bytes_are_cut(cuts: list[int]) -> None:
    reader, events = EventReader(), []
    ends = [0, *sorted(cuts), len(STREAM)]
    for begin, end in itertools.pairwise(ends):
        events += list(reader.feed(STREAM[begin:end]))
    assert events == ['{"a": 1}', "é\ntwo", "[DONE]"]
    assert not reader.unfinished


def test_an_event_that_is_not_complete() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: x\n")) == [] and reader.unfinished


@pytest.mark.parametrize(
    "received",
    [
        b"<html>busy</html>\n",
        b"data: \xff\n",
        b"data: " + b"x" * LINE_BYTES_MAX,
        b"data: xxxxxxx\n" * (LINE_BYTES_MAX // 12),
        b"\x00\x01\x02\n",
    ],
    ids=["html", "no utf-8", "a line without end", "an event without end", "binary"],
)
def test_what_is_no_event_stream(received: bytes) -> None:
    with pytest.raises(StreamBroken):
        list(EventReader().feed(received))


@given(st.binary(max_size=200))
def test_any_bytes_are_events_or_refused(received: bytes) -> None:
    try:
        assert all(isinstance(event, str) for event in EventReader().feed(received))
    except StreamBroken as error:
        assert str(error)


def choice(**fields: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "finish_reason": None, **fields}]})


@pytest.mark.parametrize(
    ("data", "chunk"),
    [
        (choice(text="a"), Chunk(text="a", carries_tokens=True)),
        (choice(text=""), Chunk()),
        (choice(text="", token_ids=[5, 6]), Chunk(token_ids=(5, 6), carries_tokens=True)),
        (choice(text="", token_ids=None, finish_reason="stop"), Chunk(finished=True)),
        (choice(delta={"role": "assistant", "content": ""}), Chunk()),
        (choice(delta={"role": "assistant", "content": None}), Chunk()),
        (choice(delta={"content": "b"}), Chunk(text="b", carries_tokens=True)),
        (choice(delta={"reasoning_content": "hm"}), Chunk(carries_tokens=True)),
        (choice(delta={"reasoning": "hm"}), Chunk(carries_tokens=True)),
        (choice(delta={"tool_calls": [{"index": 0}]}), Chunk(carries_tokens=True)),
        ('{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}', Chunk(usage=Usage(3, 2, None))),
        (
            '{"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}',
            Chunk(usage=Usage(3, 0, 2)),
        ),
        ('{"choices": null, "usage": null}', Chunk()),
    ],
)
def test_chunks(data: str, chunk: Chunk) -> None:
    assert chunk_from_data(data) == chunk


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ('{"error": {"message": "out of memory", "code": 500}}', "server_error"),
        ('{"object": "error", "message": "no"}', "server_error"),
        ("{", "malformed"),
        ("5", "malformed"),
        ("[]", "malformed"),
        ('{"choices": 5}', "malformed"),
        ('{"choices": [5]}', "malformed"),
        ('{"choices": [{"text": 5}]}', "malformed"),
        ('{"choices": [{"delta": 5}]}', "malformed"),
        ('{"choices": [{"token_ids": ["x"]}]}', "malformed"),
        ('{"choices": [], "usage": {"prompt_tokens": "x"}}', "malformed"),
        ('{"choices": [], "usage": 5}', "malformed"),
        ("[" * 50_000, "malformed"),
    ],
)
def test_events_that_are_no_chunks(data: str, kind: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        chunk_from_data(data)
    assert caught.value.kind == kind and len(caught.value.detail) <= 200


def test_requests() -> None:
    body = request_body({"prompt": [1]}, "m", 9, {"temperature": 1.0, "ignore_eos": True, "prompt": "mine"})
    assert body["prompt"] == [1] and body["temperature"] == 1.0 and body["ignore_eos"] is True
    assert body["return_token_ids"] is True and body["stream_options"] == {"include_usage": True}
    assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 9, True)
    assert "return_token_ids" not in request_body({"messages": []}, "m", 9, {})
