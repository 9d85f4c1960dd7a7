"""The page of the command line is what the parser says."""

import argparse

from kvpool_cli.main import COMMANDS, build_parser
from tools import generate_cli_docs


def test_the_page_is_current() -> None:
    current = generate_cli_docs.PAGE.read_text()
    assert current == generate_cli_docs.page_text(current), "run python -m tools.generate_cli_docs"


def test_every_example_is_understood_as_far_as_its_words_go() -> None:
    for name, command in COMMANDS.items():
        assert command.examples, name
        for example in command.examples:
            assert f"kvpool {name}" in example
            flags = {word for word in example.split() if word.startswith("--")}
            parser = build_parser([name])
            known = {flag for sub in _all(parser) for action in sub._actions for flag in action.option_strings}
            assert {flag.strip('")') for flag in flags} <= known, example


def _all(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A parser and all below it."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(each for action in below for sub in action.choices.values() for each in _all(sub))]
