"""ShareGPT-style files and block traces, good and bad."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench.serve.content import IdVocabulary, WordVocabulary
from bench.serve.inputs import BlockTrace, ShareGpt, read_items
from bench.serve.workload import Conversation, Span
from kvpool_cli.errors import CommandFailed

IDS, WORDS = IdVocabulary(1, 100, 200), WordVocabulary(1)
TALK = {
    "id": "a",
    "conversations": [
        {"from": "human", "value": "hello there"},
        {"from": "gpt", "value": "x" * 40},
        {"from": "human", "value": "and then?"},
        {"from": "gpt", "value": "y" * 8},
    ],
}
LINE = {"timestamp": 1000, "input_length": 20, "output_length": 4, "hash_ids": [7, 8]}


def written(directory: Path, text: str) -> Path:
    file = directory / "input.json"
    file.write_text(text)
    return file


def talks(file: Path, **options: Any) -> list[Conversation]:
    source = ShareGpt(file, options.get("turns"), options.get("output"), seed=1)
    return list(source.conversations(options.get("vocabulary", WORDS)))


@pytest.mark.parametrize("form", ["array", "indented array", "lines", "lines with gaps"])
def test_sharegpt_forms(form: str, tmp_path: Path) -> None:
    text = {
        "array": json.dumps([TALK, TALK]),
        "indented array": "\ufeff \n" + json.dumps([TALK, TALK], indent=1),
        "lines": f"{json.dumps(TALK)}\n{json.dumps(TALK)}\n",
        "lines with gaps": f"\n{json.dumps(TALK)}\n\n\n{json.dumps(TALK)}",
    }[form]
    found = talks(written(tmp_path, text))
    assert len(found) == 2 and found[0] == found[1]
    assert [(turn.content, turn.output_tokens) for turn in found[0].turns] == [("hello there", 10), ("and then?", 2)]


def test_roles_and_a_system_message_and_a_question_without_an_answer(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "never answered"},
    ]
    alone = {"messages": [{"role": "user", "content": "only this"}]}
    found = talks(written(tmp_path, json.dumps([{"messages": messages}, alone, []])))
    assert [[turn.content for turn in talk.turns] for talk in found] == [["be brief\nhi"], ["only this"]]


def test_turns_and_answer_lengths_can_be_set(tmp_path: Path) -> None:
    [talk] = talks(written(tmp_path, json.dumps([TALK])), turns=1, output=Span(33, 33))
    assert [(turn.content, turn.output_tokens) for turn in talk.turns] == [("hello there", 33)]


def test_texts_become_ids_that_share_what_the_texts_share(tmp_path: Path) -> None:
    one, two = IDS.read("a long word here"), IDS.read("a long word there")
    assert one[:3] == two[:3] and one[3:] != two[3:]
    [talk] = talks(written(tmp_path, json.dumps([TALK])), vocabulary=IDS)
    assert talk.turns[0].content == IDS.read("hello there")
    assert all(isinstance(token, int) and 100 <= token < 200 for token in talk.turns[0].content)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no conversation"),
        ("[]", "no conversation"),
        ('[{"conversations": []}]', "no conversation"),
        ("[1]", "item 1: want an object"),
        ('[{"conversations": 5}]', "item 1: want an object"),
        ('[{"conversations": [5]}]', "item 1: a message is no object"),
        ('[{"conversations": [{"from": "human"}]}]', "item 1: a message wants"),
        ('[{"conversations": [{"from": 1, "value": "x"}]}]', "item 1: a message wants"),
        ('[{"id": 1}, {"id"', "item 1: want an object"),
        (f'[{json.dumps(TALK)}, {{"id"', "item 2 is no JSON"),
        (f"[{json.dumps(TALK)}", "item 2 is no JSON"),
        (f"{json.dumps(TALK)}\nnonsense", "item 2 is no JSON"),
        ("[" * 100_000, "item 1"),
    ],
)
def test_what_is_no_sharegpt(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=says):
        talks(written(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="cannot be read"):
        list(read_items(tmp_path / "absent"))
    (tmp_path / "binary").write_bytes(b"[\xff\xfe]")
    with pytest.raises(CommandFailed, match="no text"):
        list(read_items(tmp_path / "binary"))


def test_items_across_the_pieces_in_which_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.serve.inputs._READ_CHARACTERS", 7)
    items = [{"a": "x" * length, "b": [1, 2.5, "]"]} for length in range(60)]
    assert list(read_items(written(tmp_path, json.dumps(items)))) == items
    assert list(read_items(written(tmp_path, "\n".join(map(json.dumps, items))))) == items


def trace_of(directory: Path, *lines: dict[str, Any], scale: float = 1.0) -> BlockTrace:
    return BlockTrace(written(directory, "\n".join(map(json.dumps, lines))), block_tokens=16, scale=scale)


def test_the_same_block_gets_the_same_tokens_and_times_count_from_the_first(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path, LINE, {**LINE, "timestamp": 2500, "hash_ids": [7, 9]}, {**LINE, "timestamp": 2500, "input_length": 32}
    )
    one, two, three = trace.conversations(IDS)
    assert [talk.start_s for talk in (one, two, three)] == [0.0, 1.5, 1.5]
    first, second, third = (talk.turns[0].content for talk in (one, two, three))
    assert (len(first), len(second), len(third)) == (20, 20, 32)
    assert first[:16] == second[:16] and first[16:] != second[16:]
    assert third[:20] == first  # a part of a block is the beginning of the whole
    assert one.turns[0].output_tokens == 4


def test_words_share_what_blocks_share(tmp_path: Path) -> None:
    one, two = trace_of(tmp_path, LINE, {**LINE, "hash_ids": [7, 9]}).conversations(WORDS)
    first, second = str(one.turns[0].content).split(), str(two.turns[0].content).split()
    assert len(first) == 20 and first[:16] == second[:16] and first != second


def test_lengths_can_be_scaled_down(tmp_path: Path) -> None:
    [talk] = trace_of(tmp_path, {**LINE, "input_length": 24, "output_length": 40}, scale=0.25).conversations(IDS)
    assert (len(talk.turns[0].content), talk.turns[0].output_tokens) == (4 + 2, 10)
    [smallest] = trace_of(tmp_path, LINE, scale=1e-6).conversations(IDS)
    assert (len(smallest.turns[0].content), smallest.turns[0].output_tokens) == (2, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"timestamp": -1}, "timestamp must be"),
        ({"timestamp": None}, "timestamp must be"),
        ({"input_length": "9"}, "input_length must be"),
        ({"output_length": True}, "output_length must be"),
        ({"output_length": float("inf")}, "output_length must be"),
        ({"hash_ids": []}, "hash_ids must be"),
        ({"hash_ids": [1.5, 2]}, "hash_ids must be"),
        ({"hash_ids": "12"}, "hash_ids must be"),
        ({"input_length": 33}, "33 tokens are not 2 blocks of 16: say --block-tokens"),
        ({"input_length": 16}, "16 tokens are not 2 blocks"),
        ({"timestamp": 999}, "sort the trace"),
    ],
)
def test_what_is_no_trace(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=f":2: {says}|:2: timestamp 999"):
        list(trace_of(tmp_path, LINE, {**LINE, **change}).conversations(IDS))


def test_an_empty_trace_and_one_of_numbers(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match="no requests"):
        list(BlockTrace(written(tmp_path, "\n"), 16, 1.0).conversations(IDS))
    with pytest.raises(CommandFailed, match=":1: want a JSON object"):
        list(BlockTrace(written(tmp_path, "5\n"), 16, 1.0).conversations(IDS))


def test_a_long_trace_is_read_as_it_is_played(tmp_path: Path) -> None:
    text = f"{json.dumps(LINE)}\n" * 3 + "nonsense"
    trace = BlockTrace(written(tmp_path, text), 16, 1.0)
    assert len(list(itertools.islice(trace.conversations(IDS), 3))) == 3
