"""The result of a load as a document: made here, read here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serve.distribution import Distribution
from bench.serve.record import Recorder, Timeline
from kvpool_cli.errors import CommandFailed

KIND, VERSION = "bench serve", 1
_FILE_BYTES_MAX = 64 << 20
_LAG_WORTH_TELLING_S = 0.02
_FEW_FOR_P99 = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a result was made of. load_id: equal for runs of the same load."""

    name: str
    command: str
    started_at: str
    interrupted: bool
    base_url: str
    api: str
    model: str
    open_loop: bool
    load: dict[str, Any]
    load_id: str
    warm_up_requests: int
    warm_up_failures: int


def to_document(
    about: About, recorder: Recorder, metrics: Mapping[str, Any], tiers: Mapping[str, float] | None
) -> dict[str, Any]:
    """The document of --json. Times are seconds."""
    elapsed_s = recorder.elapsed_s
    document = {
        "kind": KIND,
        "version": VERSION,
        **{name: getattr(about, name) for name in About.__dataclass_fields__},
        "elapsed_s": elapsed_s,
        "requests": {
            "ok": recorder.ok,
            "failed": recorder.failed,
            "unfinished": recorder.unfinished,
            "discarded": recorder.discarded,
            "abandoned_turns": recorder.abandoned_turns,
        },
        "errors": {
            kind: {"count": count, "examples": recorder.examples[kind]} for kind, count in recorder.errors.items()
        },
        "latency_s": {name: values.to_document() for name, values in recorder.latency.items()},
        "ttft_by_turn_s": [values.to_document() for values in recorder.ttft_by_turn],
        "lengths": {name: values.to_document() for name, values in recorder.lengths.items()},
        "tokens": _tokens(recorder),
        "throughput": {
            "requests_per_s": _rate(recorder.ok, elapsed_s),
            "output_tokens_per_s": _rate(recorder.output_tokens, elapsed_s),
            "prompt_tokens_per_s": _rate(recorder.prompt_tokens, elapsed_s),
        },
        "goodput": _goodput(recorder),
        "timeline": {
            "bin_s": recorder.timeline.bin_s,
            "fields": list(Timeline.FIELDS),
            "bins": recorder.timeline.bins,
        },
        "sample": recorder.sample,
        "metrics": dict(metrics),
        "tiers": None if tiers is None else dict(tiers),
    }
    return {**document, "warnings": warnings_of(document, recorder)}


def _rate(count: float, elapsed_s: float) -> float:
    return count / elapsed_s if elapsed_s > 0 else 0.0


def _tokens(recorder: Recorder) -> dict[str, Any]:
    known = recorder.cached_known
    return {
        "prompt": recorder.prompt_tokens,
        "output": recorder.output_tokens,
        "cached": recorder.cached_tokens if known else None,
        "requests_that_tell_cached": known,
        "requests_counted_here": recorder.uncounted,
    }


def _goodput(recorder: Recorder) -> dict[str, Any] | None:
    if not recorder.limits_s:
        return None
    ended = recorder.ok + recorder.failed + recorder.unfinished
    return {
        "limits_s": recorder.limits_s,
        "requests": recorder.good,
        "share": _rate(recorder.good, ended),
        "requests_per_s": _rate(recorder.good, recorder.elapsed_s),
    }


def warnings_of(document: Mapping[str, Any], recorder: Recorder) -> list[str]:
    """What makes these figures say less than they seem to."""
    ok, warnings = recorder.ok, []
    if document["interrupted"]:
        warnings.append("The load was interrupted; the figures are of what had ended by then.")
    if not ok:
        warnings.append("No request ended well; there are no latencies.")
    elif ok < _FEW_FOR_P99:
        warnings.append(
            f"{ok} requests: the 99th percentile of fewer than {_FEW_FOR_P99} is the slowest or next to it."
        )
    if recorder.failed or recorder.unfinished:
        warnings.append(
            f"{recorder.failed} requests failed and {recorder.unfinished} were cut off; latencies are of the others, "
            "which may be the quicker ones."
        )
    if document["warm_up_failures"]:
        warnings.append(f"{document['warm_up_failures']} of {document['warm_up_requests']} warm-up requests failed.")
    lag = recorder.latency["loop_lag"]
    if lag.count and lag.percentile(99) > _LAG_WORTH_TELLING_S:
        warnings.append(
            f"The generator itself was up to {lag.percentile(99) * 1e3:.0f} ms late (99th percentile): its machine or "
            "core is too busy, and all times carry that."
        )
    late = recorder.latency["send_lag"]
    if late.count and late.percentile(99) > 5 * _LAG_WORTH_TELLING_S + 2 * lag.percentile(99):
        warnings.append(
            f"Requests left up to {late.percentile(99):.2f} s after their time (99th percentile), held back by "
            "--concurrency; latencies include that."
        )
    return warnings + _token_warnings(document, recorder)


def _token_warnings(document: Mapping[str, Any], recorder: Recorder) -> list[str]:
    warnings = []
    if recorder.uncounted:
        warnings.append(
            f"{recorder.uncounted} answers came without `usage`: their tokens are counted or estimated here."
        )
    if recorder.token_events and recorder.output_tokens > 1.1 * recorder.token_events:
        warnings.append(
            f"An event carried {recorder.output_tokens / recorder.token_events:.1f} tokens on average: the inter-token "
            "latency is that between events; the time per output token is per token."
        )
    if recorder.stand_in_answers:
        warnings.append(
            f"{recorder.stand_in_answers} answers came without token ids: later turns hold made-up ones in their "
            "place, so what the server cached of its answers was of no use to it."
        )
    if document["metrics"].get("went_back"):
        warnings.append("A server restarted under load: its counters are too low.")
    for url, why in document["metrics"].get("failed", {}).items():
        warnings.append(f"{url} gave no metrics: {why}")
    return warnings


@dataclass(frozen=True, slots=True)
class Result:
    """A document that has been looked through: everything that reports use is there."""

    name: str
    document: dict[str, Any]
    latency: dict[str, Distribution]
    ttft_by_turn: list[Distribution]


def read_result(path: Path, name: str = "") -> Result:
    """A file that --json wrote. Raises CommandFailed."""
    try:
        if path.stat().st_size > _FILE_BYTES_MAX:
            raise CommandFailed(f"{path} is too large for a result of `python -m bench serve`")
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandFailed(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise CommandFailed(f"{path} is no result of `python -m bench serve --json`")
    if document.get("version") != VERSION:
        raise CommandFailed(f"{path} has version {document.get('version')}, this kvpool reads {VERSION}")
    try:
        return result_of(document, name or document["name"] or path.stem)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise CommandFailed(f"{path} is damaged: {error!r}") from error


def result_of(document: dict[str, Any], name: str) -> Result:
    """Raises AttributeError, KeyError, TypeError, ValueError or IndexError where something is wrong with it."""
    latency = {key: Distribution.from_document(value) for key, value in document["latency_s"].items()}
    for needed in ("ttft", "itl", "tpot", "e2e", "send_lag"):
        latency[needed].percentile(50)
    turns = [Distribution.from_document(value) for value in document["ttft_by_turn_s"]]
    for group, fields in _NUMBERS.items():
        for field in fields:
            float(document[group][field])
    float(document["elapsed_s"])
    if any(len(row) != len(Timeline.FIELDS) for row in document["timeline"]["bins"]):
        raise ValueError("the timeline has other columns")
    if any(len(row) != _SAMPLE_COLUMNS for row in document["sample"]):
        raise ValueError("the sample has other columns")
    for value in (document["tiers"] or {}).values():
        float(value)
    [str(warning) for warning in document["warnings"]]
    return Result(str(name), document, latency, turns)


_SAMPLE_COLUMNS = 7
_NUMBERS = {
    "requests": ("ok", "failed", "unfinished", "discarded"),
    "throughput": ("requests_per_s", "output_tokens_per_s", "prompt_tokens_per_s"),
    "tokens": ("prompt", "output"),
    "timeline": ("bin_s",),
}
