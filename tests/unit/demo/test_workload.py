import subprocess
import sys
from pathlib import Path

import pytest

from demo.tokenizer import CorpusTokenizer
from demo.workload import CONVERSATIONS_PATH, Conversation, Document, load_workload, render_context, render_prompt

TOKENIZER = CorpusTokenizer()
WORKLOAD = load_workload()
each_conversation = pytest.mark.parametrize(
    "conversation", WORKLOAD.conversations, ids=lambda conversation: conversation.name
)


def test_workload_is_as_large_as_the_demo_claims() -> None:
    assert len(WORKLOAD.conversations) >= 4
    assert all(conversation.turn_count >= 3 for conversation in WORKLOAD.conversations)
    assert WORKLOAD.turn_count == sum(len(conversation.questions) for conversation in WORKLOAD.conversations)
    assert WORKLOAD.reply_token_count > 0


@each_conversation
def test_context_is_long(conversation: Conversation) -> None:
    assert 2_000 <= len(TOKENIZER.encode(conversation.document.text)) <= 2_700


def test_contexts_are_distinct() -> None:
    """No two share more than the first chunk of 16 tokens, so no hit is owed to another conversation."""
    heads = {render_context(conversation, TOKENIZER)[:16] for conversation in WORKLOAD.conversations}
    assert len(heads) == len(WORKLOAD.conversations)
    assert len({conversation.name for conversation in WORKLOAD.conversations}) == len(heads)


def test_loading_and_rendering_give_the_same_every_time() -> None:
    again = load_workload()
    assert again == WORKLOAD
    for first, second in zip(WORKLOAD.conversations, again.conversations, strict=True):
        assert render_prompt(first, [[5, 6]], CorpusTokenizer()) == render_prompt(second, [[5, 6]], TOKENIZER)


@each_conversation
def test_each_prompt_continues_the_turn_before_it(conversation: Conversation) -> None:
    replies = [(100 + turn, 200 + turn) for turn in range(conversation.turn_count - 1)]
    before = render_context(conversation, TOKENIZER)
    for turn, question in enumerate(conversation.questions):
        prompt = render_prompt(conversation, replies[:turn], TOKENIZER)
        assert prompt[: len(before)] == before
        added = TOKENIZER.decode(prompt[len(before) :])
        assert added == question
        before = (*prompt, *replies[turn]) if turn < len(replies) else prompt


def test_prompt_layout() -> None:
    document = Document(file="a.txt", first_line=1, last_line=1, text="Light\n")
    conversation = Conversation(name="a", document=document, questions=("Why?", "How?"))
    begin, user, assistant, end = range(4)
    light, why, how = (TOKENIZER.encode(text) for text in ("Light\n", "Why?", "How?"))
    expected = [begin, *light, end, user, *why, end, assistant, 7, 8, end, user, *how, end, assistant]
    assert render_prompt(conversation, [[7, 8]], TOKENIZER) == tuple(expected)
    with pytest.raises(ValueError, match="2 turns"):
        render_prompt(conversation, [[7], [8]], TOKENIZER)


@pytest.mark.parametrize(("first_line", "last_line"), [(0, 1), (2, 1), (1, 100_000)])
def test_lines_that_are_not_there_are_refused(first_line: int, last_line: int) -> None:
    with pytest.raises(ValueError, match="has lines 1 to"):
        Document.read("us-declaration.txt", first_line, last_line)


def test_workload_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, demo.workload; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    root = Path(CONVERSATIONS_PATH).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False).returncode == 0
