"""Made-up contents, conversations about shared prefixes, arrivals, histories."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from typing import Any

import pytest

from bench.serve.arrivals import Arrival, intended_starts_s
from bench.serve.content import IdVocabulary, Vocabulary, WordVocabulary
from bench.serve.workload import History, SharedPrefixes, Span, span_from_text, warm_up_conversations

IDS, WORDS = IdVocabulary(7, 1000, 2000), WordVocabulary(7)


def shared(**changes: Any) -> SharedPrefixes:
    options: dict[str, Any] = {
        "prefix_count": 3,
        "prefix_tokens": Span(32, 32),
        "suffix_tokens": Span(8, 8),
        "output_tokens": Span(5, 5),
        "turn_count": 1,
        "turn_tokens": Span(4, 4),
        "zipf": 1.0,
        "seed": 7,
    }
    return SharedPrefixes(**{**options, **changes})


def test_content_follows_from_seed_and_name() -> None:
    content = IDS.content("x", 50)
    # Written down: the same load must come out of every machine and release.
    assert content[:4] == [1879, 1940, 1176, 1739]
    assert content == IdVocabulary(7, 1000, 2000).content("x", 50)
    assert content != IDS.content("y", 50) and content != IdVocabulary(8, 1000, 2000).content("x", 50)
    assert IDS.content("x", 20) == content[:20]
    assert all(isinstance(token, int) and 1000 <= token < 2000 for token in content)
    assert str(WORDS.content("x", 30)).startswith(str(WORDS.content("x", 20)))
    assert len(str(WORDS.content("x", 30)).split()) == 30
    assert (IDS.content("x", 0), WORDS.content("x", 0)) == ([], "")


@pytest.mark.parametrize("vocabulary", [IDS, WORDS], ids=["ids", "words"])
def test_conversations_share_their_prefixes_and_nothing_else(vocabulary: Vocabulary) -> None:
    talks = list(itertools.islice(shared().conversations(vocabulary), 60))
    assert talks == list(itertools.islice(shared().conversations(vocabulary), 60))
    prompts = [talk.turns[0].content for talk in talks]
    tokens = [prompt.split() if isinstance(prompt, str) else prompt for prompt in prompts]
    assert {len(prompt) for prompt in tokens} == {40}
    heads = Counter(tuple(prompt[:32]) for prompt in tokens)
    assert len(heads) == 3
    assert len({tuple(prompt[32:]) for prompt in tokens}) == 60


def test_zipf_says_how_popular_prefixes_are() -> None:
    def counts(zipf: float) -> list[int]:
        talks = itertools.islice(shared(zipf=zipf, prefix_tokens=Span(4, 4)).conversations(IDS), 3000)
        return sorted(Counter(tuple(talk.turns[0].content[:4]) for talk in talks).values(), reverse=True)

    assert counts(0.0) == pytest.approx([1000, 1000, 1000], rel=0.1)
    assert counts(1.0) == pytest.approx([1636, 818, 545], rel=0.12)  # 1, 1/2, 1/3


def test_lengths_vary_within_their_spans_and_turns_follow() -> None:
    source = shared(prefix_tokens=Span(10, 20), suffix_tokens=Span(1, 3), turn_count=3, output_tokens=Span(0, 2))
    talks = list(itertools.islice(source.conversations(IDS), 50))
    lengths = {len(talk.turns[0].content) for talk in talks}
    assert len(lengths) > 1 and min(lengths) >= 11 and max(lengths) <= 23
    assert {tuple(len(turn.content) for turn in talk.turns[1:]) for talk in talks} == {(4, 4)}
    assert {turn.output_tokens for talk in talks for turn in talk.turns} == {1, 2}


def test_warm_up_shares_no_prefix_with_what_is_measured() -> None:
    source = shared(turn_count=2)
    warm = warm_up_conversations(source.conversations(IDS), IDS, 3)
    measured = list(itertools.islice(source.conversations(IDS), 3))
    assert [len(talk.turns) for talk in warm] == [1, 1, 1]
    for salted, talk in zip(warm, measured, strict=True):
        assert salted.turns[0].content[16:] == talk.turns[0].content
    assert len({tuple(salted.turns[0].content[:16]) for salted in warm}) == 3


def test_histories_grow_by_real_answers() -> None:
    ids = History(IDS, chat=False)
    ids.ask([1, 2])
    before = ids.fields()
    ids.answer("ignored", [3])
    ids.ask([4])
    assert before == {"prompt": [1, 2]} and ids.fields() == {"prompt": [1, 2, 3, 4]} and ids.prompt_tokens == 4

    text = History(WORDS, chat=False)
    text.ask("question")
    text.answer(" answer", [])
    text.ask("more")
    assert text.fields() == {"prompt": "question answer\n\nmore"}

    chat = History(WORDS, chat=True)
    chat.ask("question")
    chat.answer("answer", [])
    chat.ask("more")
    assert [(message["role"], message["content"]) for message in chat.fields()["messages"]] == [
        ("user", "question"),
        ("assistant", "answer"),
        ("user", "more"),
    ]


@pytest.mark.parametrize(("text", "span"), [("5", Span(5, 5)), ("2:9", Span(2, 9)), ("0.5:1.5", Span(0.5, 1.5))])
def test_spans(text: str, span: Span) -> None:
    assert span_from_text(text) == span


@pytest.mark.parametrize("text", ["", "x", "9:2", "-1", "1:inf", "nan", "1:2:3"])
def test_what_is_no_span(text: str) -> None:
    with pytest.raises(ValueError, match=r"want N|could not convert"):
        span_from_text(text)


def test_constant_arrivals() -> None:
    assert list(itertools.islice(intended_starts_s(Arrival.CONSTANT, 4.0, 1), 4)) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_the_rate_and_its_spread() -> None:
    starts = list(itertools.islice(intended_starts_s(Arrival.POISSON, 5.0, 1), 20_000))
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert starts == sorted(starts)
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)
    assert starts[:5] == list(itertools.islice(intended_starts_s(Arrival.POISSON, 5.0, 1), 5))
    assert starts[:5] != list(itertools.islice(intended_starts_s(Arrival.POISSON, 5.0, 2), 5))
