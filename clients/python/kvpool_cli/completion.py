"""`kvpool completion SHELL`: a script that completes commands, options and their choices, made from the parser."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvpool_cli.output import EXIT_OK

SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "OUTPUT", "TRACE", "RESULT")  # as positional arguments that are files are called


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare `kvpool completion`."""
    parser.add_argument("shell", choices=SHELLS, help="which shell")
    parser.set_defaults(run=run_completion)


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from kvpool_cli.main import COMMANDS, build_parser

    paths = list(walk(build_parser(list(COMMANDS))))
    print({"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[arguments.shell](paths))
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class Option:
    """One flag. values: what may follow it; empty and takes_value: anything, such as a file."""

    flag: str
    text: str
    takes_value: bool
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Path:
    """A command or an action of one, with what may follow its name."""

    words: tuple[str, ...]
    actions: tuple[tuple[str, str], ...]  # name and summary
    values: tuple[str, ...]  # choices of positional arguments
    options: tuple[Option, ...]
    takes_files: bool

    @property
    def key(self) -> str:
        return " ".join(self.words)


def walk(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[Path]:
    """The tree of a parser, the root first."""
    actions: list[tuple[str, str]] = []
    values: list[str] = []
    takes_files = False
    options: list[Option] = []
    below: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            below += action.choices.items()
            actions += [(name, _plain(summaries.get(name, ""))) for name in action.choices]
        elif action.option_strings:
            choices = tuple(map(str, action.choices)) if action.choices is not None else ()
            takes_value = action.nargs != 0
            options += [Option(flag, _plain(action.help or ""), takes_value, choices) for flag in action.option_strings]
        elif action.choices is not None:
            values += map(str, action.choices)
        else:
            takes_files |= action.metavar in _FILES
    yield Path(words, tuple(actions), tuple(values), tuple(options), takes_files)
    for name, sub in below:
        yield from walk(sub, (*words, name))


def bash_script(paths: list[Path]) -> str:
    """Looks for the longest path among the words before the cursor, then offers what may follow it."""
    known = " ".join(f'["{path.key}"]=1' for path in paths if path.words)
    return f"""# Completion of kvpool for bash: eval "$(kvpool completion bash)"
declare -A _kvpool_paths=({known})
{_cases(paths)}
_kvpool() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} at="" offered="" files="" word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    local longer="${{at:+$at }}$word"
    [[ -n ${{_kvpool_paths[$longer]:-}} ]] && at=$longer
  done
  COMPREPLY=()
  if [[ $before == -* ]] && _kvpool_offer "$at" "$before"; then
    if [[ -n $offered ]]; then COMPREPLY=($(compgen -W "$offered" -- "$current"))
    else mapfile -t COMPREPLY < <(compgen -f -- "$current"); fi
    return
  fi
  _kvpool_offer "$at" ""
  [[ -n $files && $current != -* ]] || COMPREPLY=($(compgen -W "$offered" -- "$current"))
  [[ ${{#COMPREPLY[@]}} -eq 0 && $current != -* ]] && mapfile -t COMPREPLY < <(compgen -f -- "$current")
}}
complete -o filenames -F _kvpool kvpool"""


def zsh_script(paths: list[Path]) -> str:
    """The same way in zsh's own words."""
    known = " ".join(f'"{path.key}" 1' for path in paths if path.words)
    return f"""#compdef kvpool
# Completion of kvpool for zsh: eval "$(kvpool completion zsh)" in ~/.zshrc
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
typeset -gA _kvpool_paths
_kvpool_paths=({known})
{_cases(paths)}
_kvpool() {{
  local before=${{words[CURRENT-1]}} at="" offered="" files="" word longer
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    longer="${{at:+$at }}$word"
    [[ -n ${{_kvpool_paths[$longer]}} ]] && at=$longer
  done
  if [[ $before == -* ]] && _kvpool_offer "$at" "$before"; then
    if [[ -n $offered ]]; then compadd -- ${{=offered}}; else _files; fi
    return
  fi
  _kvpool_offer "$at" ""
  if [[ -n $files && ${{words[CURRENT]}} != -* ]]; then _files; return; fi
  compadd -- ${{=offered}}
  [[ ${{words[CURRENT]}} == -* || -z $at ]] || _files
}}
compdef _kvpool kvpool"""


def _cases(paths: list[Path]) -> str:
    """A function for bash and zsh: sets `offered` to what may follow a path, or to the values of an option there.

    It sets `files` where files may follow, which are more likely meant than an option that was not begun.
    """
    below = []
    for path in paths:
        words = [name for name, _ in path.actions] + list(path.values) + [option.flag for option in path.options]
        files = " files=1" if path.takes_files else ""
        below.append(f'    "{path.key}") offered="{" ".join(words)}"{files} ;;')
    values = [
        f'    "{path.key} {option.flag}") offered="{" ".join(option.values)}"; return 0 ;;'
        for path in paths
        for option in path.options
        if option.takes_value
    ]
    lines = [
        "_kvpool_offer() {",
        '  offered="" files=""',
        '  case "$1 $2" in',
        *values,
        "  esac",
        "  [[ -n $2 ]] && return 1",
    ]
    return "\n".join([*lines, '  case "$1" in', *below, "  esac", "}"])


def fish_script(paths: list[Path]) -> str:
    """One `complete` a name, option or choice; conditions tell where in the tree it belongs."""
    lines = ["# Completion of kvpool for fish: kvpool completion fish | source"]
    for path in paths:
        names = " ".join(name for name, _ in path.actions)
        where = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in path.words)
        if not path.words:
            where = f"not __fish_seen_subcommand_from {names}"
        for name, summary in path.actions:
            place = where if not path.words else f"{where}; and not __fish_seen_subcommand_from {names}"
            lines.append(f"complete -c kvpool -f -n {_single(place)} -a {name} -d {_single(summary)}")
        lines += [f"complete -c kvpool -f -n {_single(where)} -a {value}" for value in path.values]
        for option in path.options:
            kind = "-l" if option.flag.startswith("--") else "-s"
            wants = " -r" if option.takes_value else ""
            choices = f" -f -a {_single(' '.join(option.values))}" if option.values else ""
            condition = f" -n {_single(where)}" if path.words else ""
            name, text = option.flag.lstrip("-"), _single(option.text)
            lines.append(f"complete -c kvpool{condition} {kind} {name}{wants}{choices} -d {text}")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """One short line for a menu."""
    return re.sub(r"\s+", " ", text.replace("%%", "%")).strip()[:80]


def _single(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
