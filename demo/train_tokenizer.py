"""Train demo/tokenizer.json on the carried text: `python -m demo.train_tokenizer`.

The result depends only on the corpus, the settings below and the version of the tokenizers library; the file is
committed, so this runs again only when the corpus changes.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.corpus_files import corpus_paths
from demo.tokenizer import SPECIAL_TOKENS, TOKENIZER_PATH

VOCABULARY_SIZE = 4096  # half a megabyte of text supports no more merges than this


def train(paths: list[Path]) -> Tokenizer:
    """A byte-level BPE tokenizer of VOCABULARY_SIZE tokens; the special tokens have the lowest ids, in order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        # Every byte has a token, so any text at all can be encoded.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((path.read_text(encoding="utf-8") for path in paths), trainer)
    return tokenizer


def main() -> None:
    tokenizer = train(corpus_paths())
    tokenizer.save(str(TOKENIZER_PATH), pretty=False)
    print(f"{TOKENIZER_PATH}: {tokenizer.get_vocab_size()} tokens, {TOKENIZER_PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
