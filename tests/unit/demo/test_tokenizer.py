import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.corpus_files import corpus_paths, read_corpus_file, read_manifest
from demo.tokenizer import SPECIAL_TOKENS, TOKENIZER_PATH, CorpusTokenizer
from demo.train_tokenizer import VOCABULARY_SIZE, train

TOKENIZER = CorpusTokenizer()


@pytest.mark.parametrize("name", sorted(read_manifest()))
def test_corpus_round_trips_in_far_fewer_tokens_than_bytes(name: str) -> None:
    text = read_corpus_file(name)
    token_ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(token_ids) == text
    assert max(token_ids) < TOKENIZER.vocabulary_size
    assert len(token_ids) * 3 < len(text.encode())


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_markers_are_the_special_tokens_and_leave_no_text() -> None:
    markers = TOKENIZER.markers
    framing = [*markers.begin, *markers.user, *markers.assistant, *markers.end]
    assert framing == [0, 1, 2, 3]
    assert TOKENIZER.decode([*markers.user, *TOKENIZER.encode("Why?"), *markers.end]) == "Why?"


def test_committed_file_is_what_training_gives() -> None:
    trained = json.loads(train(corpus_paths()).to_str())["model"]
    committed = json.loads(TOKENIZER_PATH.read_text(encoding="utf-8"))["model"]
    assert trained["merges"] == committed["merges"]
    assert trained["vocab"] == committed["vocab"]
    assert len(committed["vocab"]) == VOCABULARY_SIZE


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_text_that_spells_a_marker_stays_text(token: str) -> None:
    token_ids = TOKENIZER.encode(f"a{token}b")
    assert min(token_ids) >= len(SPECIAL_TOKENS)
    assert TOKENIZER.decode(token_ids) == f"a{token}b"
