"""`python -m bench serve` and `python -m bench serve-report`: from options to figures."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from bench.rig.results import progress
from bench.serve import counters
from bench.serve.drive import Load, LoadPlan
from bench.serve.http import HttpServer, open_session
from bench.serve.options import plan_of, source_of, vocabulary_of
from bench.serve.record import Outcome, Recorder
from bench.serve.results import About, Result, read_result, result_of, to_document
from bench.serve.tables import render, seconds_text
from bench.serve.workload import warm_up_conversations
from kvpool_cli.errors import EXIT_FAILED, EXIT_OK, CommandFailed
from kvpool_cli.output import print_json, say

_PROGRESS_S = 0.5
_BAR = 24
# Options that say where and what for, not which load: runs that differ only in these can be compared.
_NOT_LOAD = {
    *("argv", "run"),
    *("base_url", "model", "api_key_env", "timeout_s", "metrics", "warmup"),
    *("name", "goodput", "json", "html", "log"),
}


def run_serve(arguments: argparse.Namespace) -> int:
    """Put load on a server; exit code 1 if it was interrupted or no request ended well."""
    _check(arguments)
    _raise_descriptor_limit()
    with _log(arguments.log) as log:
        document = asyncio.run(_measure(arguments, log))
    result = result_of(document, document["name"])
    _write(arguments.json, document)
    if arguments.html:
        write_html([result], arguments.html)
    if arguments.json == "-":
        print_json(document)
    else:
        print(render([result]))
    return EXIT_FAILED if document["interrupted"] or not document["requests"]["ok"] else EXIT_OK


def run_report(arguments: argparse.Namespace) -> int:
    """Results side by side."""
    names = arguments.names.split(",") if arguments.names else [""] * len(arguments.results)
    if len(names) != len(arguments.results):
        raise CommandFailed(f"--names wants {len(arguments.results)} names with commas between")
    results = [read_result(path, name) for path, name in zip(arguments.results, names, strict=True)]
    if arguments.html:
        write_html(results, arguments.html)
    print(render(results))
    return EXIT_OK


def write_html(results: list[Result], path: Path) -> None:
    """Raises CommandFailed."""
    from bench.serve.html import html_report

    text = html_report(results)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror or error}") from error


@dataclass(slots=True)
class _Run:
    """What of a run belongs together."""

    plan: LoadPlan
    recorder: Recorder
    load: Load


async def _measure(arguments: argparse.Namespace, log: TextIO | None) -> dict[str, Any]:
    vocabulary, source = vocabulary_of(arguments), source_of(arguments)
    api_key = os.environ.get(arguments.api_key_env, "") if arguments.api_key_env else ""
    async with open_session(arguments.timeout_s, api_key) as session:
        server = HttpServer(session, arguments.base_url, arguments.api)
        plan = plan_of(arguments, arguments.model or await server.first_model())
        recorder = Recorder(arguments.goodput, arguments.discard_s, arguments.seed)
        load = Load(plan, server, vocabulary, recorder, _logger(recorder, log))
        warm_up = warm_up_conversations(source.conversations(vocabulary), vocabulary, arguments.warmup)
        urls = [counters.metrics_url(text) for text in arguments.metrics]
        interrupted = False

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            load.stop()

        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        with _interruptible(interrupt):
            progress("warming up" if warm_up else "")
            failures = await load.warm_up(warm_up)
            own = [] if server.metrics_url in urls else [server.metrics_url]
            before = await counters.scrape(session, [*urls, *own])
            for url in own:  # not asked for: its absence is no failure
                before.failed.pop(url, None)
            watch = asyncio.create_task(_show(_Run(plan, recorder, load)))
            try:
                await load.run(source.conversations(vocabulary))
            finally:
                watch.cancel()
                progress("")
            after = await counters.scrape(session, [*before.by_url])
    change = counters.moved(before, after)
    about = _about(arguments, plan, started_at, interrupted, len(warm_up), failures)
    tiers = counters.tiers(change.counters, recorder.all_prompt_tokens)
    return to_document(about, recorder, counters.to_document(change, [*before.by_url]), tiers)


def _about(
    arguments: argparse.Namespace, plan: LoadPlan, started_at: str, interrupted: bool, warm_up: int, failures: int
) -> About:
    load = {
        name: value if isinstance(value, int | float | str | list | dict | None) else str(value)
        for name, value in sorted(vars(arguments).items())
        if name not in _NOT_LOAD
    }
    identity = {**load, "input": arguments.input.name if arguments.input else None}
    return About(
        name=arguments.name or (Path(arguments.json).stem if arguments.json not in (None, "-") else plan.model),
        command=" ".join(["python -m bench", *arguments.argv]),
        started_at=started_at,
        interrupted=interrupted,
        base_url=arguments.base_url,
        api=str(arguments.api),
        model=plan.model,
        open_loop=plan.open_loop,
        load=load,
        load_id=hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16],
        warm_up_requests=warm_up,
        warm_up_failures=failures,
    )


def _check(arguments: argparse.Namespace) -> None:
    if any("@" in urlsplit(url).netloc for url in (arguments.base_url, *map(counters.metrics_url, arguments.metrics))):
        # Results name their URLs and options.
        raise CommandFailed("leave name and password out of URLs; a key is read from the variable of --api-key-env")
    if urlsplit(arguments.base_url).scheme not in ("http", "https"):
        raise CommandFailed(f"--base-url {arguments.base_url} wants http:// or https://")
    for path in (arguments.html, None if arguments.json in (None, "-") else Path(arguments.json)):
        # Refused now, not after an hour of load.
        if path is not None and not path.parent.is_dir():
            raise CommandFailed(f"{path} cannot be written: {path.parent} is no directory")


def _raise_descriptor_limit() -> None:
    """An open loop has as many connections as requests under way; the soft limit is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def _interruptible(interrupt: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C asks once; a second one ends the command as usual."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        say("stopping; what was measured so far follows")
        interrupt()

    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def _log(path: Path | None) -> Iterator[TextIO | None]:
    if path is None:
        yield None
        return
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror or error}") from error


def _logger(recorder: Recorder, log: TextIO | None) -> Callable[[Outcome], None]:
    def write(outcome: Outcome) -> None:
        if log is not None:
            log.write(json.dumps(outcome.to_line(recorder.begin_s)) + "\n")

    return write


async def _show(run: _Run) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        elapsed_s = asyncio.get_running_loop().time() - run.recorder.begin_s
        progress(progress_line(run.plan, run.recorder, run.load, elapsed_s))


def progress_line(plan: LoadPlan, recorder: Recorder, load: Load, elapsed_s: float) -> str:
    """How far it is, in one line."""
    shares = [elapsed_s / plan.duration_s] if plan.duration_s else []
    shares += [(load.sent - load.in_flight) / plan.request_limit] if plan.request_limit else []
    filled = round(min(1.0, max(shares, default=0.0)) * _BAR)
    bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] " if shares else ""
    ttft = recorder.latency["ttft"]
    return (
        f"{bar}{elapsed_s:.0f} s, {recorder.ok} done, {load.in_flight} under way, {recorder.failed} failed, "
        f"{recorder.output_tokens / max(elapsed_s, 1e-9):,.0f} tokens/s, ttft p50 {seconds_text(ttft.percentile(50))}"
    )


def _write(name: str | None, document: dict[str, Any]) -> None:
    if name in (None, "-"):
        return
    try:
        Path(str(name)).write_text(json.dumps(document) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{name} cannot be written: {error.strerror or error}") from error
