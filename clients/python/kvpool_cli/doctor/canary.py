"""The canary: greedy tokens of a prompt that one server computes and another one loads from the pool are equal.

The first server computes a prefix of whole chunks, then the prompt: that prefix and less than a block more. What it
continues with comes from its own cache up to the prefix's end; what the second continues with comes from the pool up
to the same token. Their continuations differ only if KV was changed on its way. Each attempt has a prompt of its own,
so that another server cannot have it in a cache of its own; the server's counters show if it is the same one. Blocking.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool_cli.doctor.engine_server import CONNECTOR_HITS, Answer, EngineServer, Source
from kvpool_cli.doctor.finding import Finding, Level, failure, ok, warning
from kvpool_cli.errors import CommandFailed, UsageFailed

SAVE_VERSION = 2
PREFIX_TOKENS = 2048  # a multiple of every usual chunk size
_TAIL_TOKENS = 15  # less than any engine's block: nothing after the prefix can be loaded
_OUTPUT_TOKENS = 32
_TTL_S = 3600  # after which prompts leave the pool
_SAVED_TTL_S = 24 * 3600  # of those that wait for a restart
_WAITS_S = (2.0, 5.0, 15.0)  # before the second server is asked: stores go on after an answer
_REPORTING = "start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report"
_OTHER_PROCESS = "make sure that it is another process than --server"
_RESTARTED = "restart the server before each run"
_WORDS = ("river", "stone", "paper", "light", "engine", "garden", "seven", "market", "winter", "copper", "letter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the first server made of a prompt, as saved for a run after its restart.

    process_start_s: of the server, since the epoch; None if it does not say.
    """

    server: str
    prompt: tuple[int, ...]
    answer: Answer
    process_start_s: float | None = None


def canary(server: EngineServer, second: EngineServer) -> Iterator[Finding]:
    """Two servers, now."""
    if server.url == second.url:
        raise UsageFailed("--second is --server: name another server, or use --save, a restart and --expect")
    loaded_before = 0
    for wait_s in _WAITS_S:
        reference = compute(server, _TTL_S)
        time.sleep(wait_s)
        answer = second.complete(reference.prompt, _OUTPUT_TOKENS, {"ttl_s": _TTL_S})
        loaded = answer.cached_tokens or 0
        if answer.cached_tokens is None or answer.source is Source.OWN_CACHE or loaded >= PREFIX_TOKENS:
            break
        if 0 < loaded == loaded_before:  # a longer wait does not help
            break
        loaded_before = loaded
    yield from compare(reference, second.url, answer)


def canary_of_file(server: EngineServer, file: Path) -> Iterator[Finding]:
    """One server after its restart, or another one, and what was saved before."""
    reference = _read(file)
    started_s = server.process_start_s()
    # The same second at another address may be another server's: two that a script starts at once.
    if started_s is not None and started_s == reference.process_start_s and server.url == reference.server:
        yield failure(
            "canary",
            f"{server} was not restarted since --save and still has the prompt in its own cache, so that this proves "
            "nothing",
            "restart it, then run this again",
        )
        return
    yield from compare(reference, server.url, server.complete(reference.prompt, _OUTPUT_TOKENS, {"ttl_s": _TTL_S}))


def save(server: EngineServer, file: Path) -> Iterator[Finding]:
    """Compute, and keep for a later run."""
    reference = compute(server, _SAVED_TTL_S)
    try:
        file.write_text(json.dumps(_to_document(reference)) + "\n")
    except OSError as error:
        raise CommandFailed(f"{file} cannot be written: {error}") from error
    if reference.answer.cached_tokens is None:
        yield warning(
            "canary", f"{server} does not report cached tokens: --expect will prove nothing", f"restart: {_REPORTING}"
        )
    yield ok(
        "canary",
        f"{server} computed {len(reference.prompt)} tokens; restart it and run with --expect {file} within a day",
    )


def compute(server: EngineServer, ttl_s: int) -> Reference:
    """A prompt that was never asked before, computed up to the end of its prefix and then from there."""
    words = random.SystemRandom().choices(_WORDS, k=PREFIX_TOKENS + _TAIL_TOKENS)
    prompt = tuple(server.tokenize(" ".join(words))[: PREFIX_TOKENS + _TAIL_TOKENS])
    if len(prompt) < PREFIX_TOKENS + _TAIL_TOKENS:
        raise CommandFailed(f"{server} makes {len(prompt)} tokens of {len(words)} words")
    options = {"load": False, "ttl_s": ttl_s}  # what the pool returned would be compared with itself
    prefix = server.complete(prompt[:PREFIX_TOKENS], 1, options)
    answer = server.complete(prompt, _OUTPUT_TOKENS, options)
    for each in (prefix, answer):
        if each.source is Source.CONNECTOR:
            raise CommandFailed(
                f"{server} loaded {each.cached_tokens} tokens of the reference instead of computing them, so that this "
                "proves nothing; start it with its own prefix caching, or compute on another server"
            )
    return Reference(server=server.url, prompt=prompt, answer=answer, process_start_s=server.process_start_s())


def compare(reference: Reference, server: str, answer: Answer) -> Iterator[Finding]:
    """What the two continuations say."""
    unproven = _unproven(reference, server, answer)
    if unproven is not None:
        yield unproven
        if unproven.level is Level.ERROR:
            return
    yield _equality(reference, server, answer)


def _unproven(reference: Reference, server: str, answer: Answer) -> Finding | None:
    """Why the answer does not prove that the pool served it: an error, or a warning if that is not certain."""
    if answer.cached_tokens is None:
        return failure(
            "canary",
            f"{server} does not report cached tokens, so that this proves nothing",
            _REPORTING,
        )
    if not answer.cached_tokens:
        return failure(
            "canary",
            f"{server} loaded nothing of what {reference.server} computed, so that this proves nothing",
            "check that both have kvpool's connector, one index, the same weights and KV cache settings, that `load` "
            "is not never, and that vllm:kvpool_declined_chunks did not grow",
        )
    if answer.hits is not None and answer.source is Source.OWN_CACHE:
        return failure(
            "canary",
            f"{server} had {answer.cached_tokens} cached tokens, of which a connector loaded "
            f"{answer.hits.connector_tokens}: the others were in its own cache, so that this proves nothing",
            f"with --second {_OTHER_PROCESS}; with --expect {_RESTARTED}",
        )
    if answer.source is Source.UNKNOWN:
        reason = f"has no {CONNECTOR_HITS}" if answer.hits is None else "served other requests meanwhile"
        return warning(
            "canary",
            f"{server} {reason}: tokens from the pool cannot be told apart from those in its own cache",
            f"with --second {_OTHER_PROCESS}; with --expect {_RESTARTED}",
        )
    return None


def _equality(reference: Reference, server: str, answer: Answer) -> Finding:
    where = f"{server} loaded {answer.cached_tokens} of {len(reference.prompt)} tokens"
    expected, got = reference.answer.tokens, answer.tokens
    if expected == got:
        return ok("canary", f"{where}; its greedy tokens are those of {reference.server}")
    return failure(
        "canary",
        f"{where}; its greedy {_difference(reference, got)}{_rounding(reference, answer)}",
        "do not share KV between these servers: take the connector out, `kvpool cache clear` the keyspace, report it",
    )


def _difference(reference: Reference, got: Sequence[int | str]) -> str:
    expected = reference.answer.tokens
    if any(isinstance(each, str) for each in (*expected, *got)):
        return f"text differs from that of {reference.server}"
    pairs = enumerate(zip(expected, got, strict=False), start=1)  # for people the first token is 1
    differing = next((number for number, (left, right) in pairs if left != right), min(len(expected), len(got)) + 1)
    return f"tokens differ from those of {reference.server} from token {differing} of {len(expected)} on"


def _rounding(reference: Reference, answer: Answer) -> str:
    """Another possible cause: the two did not compute from the same token on."""
    own = reference.answer.cached_tokens
    if own == answer.cached_tokens:
        return ""
    began = f"began to compute after {own} tokens" if own is not None else "does not report where it began to compute"
    return f" ({reference.server} {began}: rounding may be the cause)"


def _to_document(reference: Reference) -> dict[str, Any]:
    answer = reference.answer
    return {
        "version": SAVE_VERSION,
        "server": reference.server,
        "process_start_s": reference.process_start_s,
        "prompt": reference.prompt,
        "answer": {"tokens": answer.tokens, "cached_tokens": answer.cached_tokens},
    }


def _read(file: Path) -> Reference:
    try:
        raw = json.loads(file.read_text())
        if raw["version"] != SAVE_VERSION:
            raise ValueError("another version")
        answer = Answer(tokens=tuple(raw["answer"]["tokens"]), cached_tokens=raw["answer"]["cached_tokens"])
        return Reference(
            server=raw["server"],
            prompt=tuple(raw["prompt"]),
            answer=answer,
            process_start_s=raw["process_start_s"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"{file} is not what --save wrote: {error}") from error
