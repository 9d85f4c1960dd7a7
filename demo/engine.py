"""One engine process of the demo: `python -m demo.engine --output FILE [--agent unix:...]`.

Replays all conversations, in order, each turn with its own earlier replies. A line on stdout for each finished turn;
the results go to FILE. Without an agent it is the reference: transformers alone, every prompt computed from its start.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol

import torch

from demo.cluster import KEYSPACE_NAME
from demo.model import DemoModel, build_model
from demo.report import TurnResult, phase_to_document
from demo.workload import Conversation, Workload, load_workload, render_prompt
from kvpool.client.engine_items import RequestStats
from kvpool.connectors.first_token import FirstTokenTimer
from kvpool.connectors.transformers import SharedPrefixGenerator
from kvpool.connectors.transformers_model import shared_model
from kvpool.core.errors import InvalidRequest, KvPoolError

CHUNK_TOKENS = 64  # fine enough that little of a 2,000-token prompt is left to compute
WARM_UP_TOKENS = 192
AWAIT_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 60.0
MATCH_TIMEOUT_S = 10.0  # one machine runs everything, and models on its CPU
AWAIT_POLL_S = 0.05
EXIT_REFUSED = 2

_log = logging.getLogger(__name__)


class Generate(Protocol):
    """Generates `new_tokens` greedily after a prompt of shape [1, tokens]."""

    def __call__(
        self, input_ids: torch.Tensor, new_tokens: int, timer: FirstTokenTimer
    ) -> tuple[torch.Tensor, RequestStats]: ...


def plain(model: DemoModel) -> Generate:
    """Without kvpool."""

    def generate(input_ids: torch.Tensor, new_tokens: int, timer: FirstTokenTimer) -> tuple[torch.Tensor, RequestStats]:
        sequences = model.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            streamer=timer,
        )
        return sequences, RequestStats(recomputed=input_ids.shape[1])

    return generate


def shared(generator: SharedPrefixGenerator) -> Generate:
    """With kvpool."""

    def generate(input_ids: torch.Tensor, new_tokens: int, timer: FirstTokenTimer) -> tuple[torch.Tensor, RequestStats]:
        result = generator.generate(input_ids, max_new_tokens=new_tokens, do_sample=False, streamer=timer)
        return result.sequences, result.stats.prompt_tokens

    return generate


def run_turn(
    generate: Generate, model: DemoModel, conversation: Conversation, replies: Sequence[Sequence[int]], new_tokens: int
) -> TurnResult:
    """The next turn after `replies`."""
    prompt = render_prompt(conversation, replies, model.tokenizer)
    input_ids = torch.tensor([prompt], dtype=torch.long, device=model.model.device)
    timer = FirstTokenTimer()
    started_s = time.perf_counter()
    sequences, prompt_tokens = generate(input_ids, new_tokens, timer)
    assert timer.at_s is not None, "generation without a token"
    return TurnResult(
        conversation=conversation.name,
        turn=len(replies),
        ttft_ms=(timer.at_s - started_s) * 1e3,
        prompt_tokens=prompt_tokens,
        prompt=prompt,
        reply=tuple(sequences[0, len(prompt) :].tolist()),
    )


def replay(generate: Generate, model: DemoModel, workload: Workload, turn_limit: int) -> list[TurnResult]:
    """Every turn of every conversation; says on stdout which are done."""
    results: list[TurnResult] = []
    for conversation in workload.conversations:
        replies: list[tuple[int, ...]] = []
        for _ in range(min(turn_limit, conversation.turn_count)):
            result = run_turn(generate, model, conversation, replies, workload.reply_token_count)
            replies.append(result.reply)
            results.append(result)
            print(f"{conversation.name} turn {result.turn + 1}: {result.ttft_ms:.0f} ms", flush=True)
    return results


def warm_up(model: DemoModel) -> None:
    """One generation that has nothing to do with the workload, so that no phase pays for lazy initialization."""
    vocabulary = model.model.config.get_text_config().vocab_size
    input_ids = torch.arange(WARM_UP_TOKENS, device=model.model.device).remainder(vocabulary).unsqueeze(0)
    plain(model)(input_ids, 2, FirstTokenTimer())


def check_room(model: DemoModel, workload: Workload) -> None:
    """Raises InvalidRequest for a model that cannot take the workload's prompts."""
    limit = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    for conversation in workload.conversations:
        fillers = [[0] * workload.reply_token_count] * (conversation.turn_count - 1)
        needed = len(render_prompt(conversation, fillers, model.tokenizer)) + workload.reply_token_count
        if limit is not None and needed > limit:
            raise InvalidRequest(
                f"model {model.name} has {limit} positions, conversation {conversation.name} needs {needed}; "
                "use a model with a longer context"
            )


def connected(model: DemoModel, arguments: argparse.Namespace) -> AbstractContextManager[SharedPrefixGenerator | None]:
    """A generator on the agent that was named, or None."""
    if not arguments.agent:
        return nullcontext()
    return SharedPrefixGenerator.connect(
        model.model,
        arguments.agent,
        model_id=model.name,
        model_revision=model.revision,
        keyspace_name=KEYSPACE_NAME,
        chunk_tokens=CHUNK_TOKENS,
        cache_bytes=arguments.cache_bytes,
        engine_name=arguments.name,
        match_timeout_s=MATCH_TIMEOUT_S,
        connect_timeout_s=CONNECT_TIMEOUT_S,
    )


def await_prefixes(generator: SharedPrefixGenerator, prompts: Sequence[tuple[Sequence[int], int]]) -> None:
    """Wait until the cluster has so many tokens of each prompt: after a restart its index learns them again."""
    deadline_s = time.monotonic() + AWAIT_TIMEOUT_S
    for prompt, token_count in prompts:
        while (found := _available(generator, prompt)) < token_count:
            if time.monotonic() > deadline_s:
                _log.warning("the cluster has %d tokens of a prompt, %d were expected", found, token_count)
                break
            time.sleep(AWAIT_POLL_S)


def _available(generator: SharedPrefixGenerator, prompt: Sequence[int]) -> int:
    try:
        return generator.available_tokens(torch.tensor([prompt], dtype=torch.long))
    except KvPoolError as error:
        _log.info("not yet: %s", error)
        return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 for a model that cannot be served, with one line that says why."""
    parser = argparse.ArgumentParser(prog="demo.engine", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--name", default="engine")
    parser.add_argument("--model", default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--agent", default="")
    parser.add_argument("--conversations", type=int, default=None)
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--cache-bytes", type=int, default=1 << 29)
    parser.add_argument(
        "--await", dest="awaited", type=Path, help="JSON: [[prompt, tokens the cluster must have], ...]"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--check-only", action="store_true", help="only see whether the model can be served")
    arguments = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Engines of one machine would otherwise wait for each other's threads, and the figures would say so.
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 is to mean that, or equal tokens would be luck
    try:
        _run(arguments)
    except (KvPoolError, OSError) as error:
        print(f"demo: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return EXIT_REFUSED
    return 0


def _run(arguments: argparse.Namespace) -> None:
    workload = load_workload()
    workload = Workload(
        conversations=workload.conversations[: arguments.conversations], reply_token_count=workload.reply_token_count
    )
    model = build_model(arguments.model, arguments.seed, arguments.device)
    check_room(model, workload)
    if arguments.check_only:
        shared_model(model.model, model_id=model.name, model_revision=model.revision, chunk_tokens=CHUNK_TOKENS)
        return
    warm_up(model)
    with connected(model, arguments) as generator:
        if generator is not None and arguments.awaited is not None:
            await_prefixes(generator, json.loads(arguments.awaited.read_text()))
        generate = plain(model) if generator is None else shared(generator)
        results = replay(generate, model, workload, arguments.turns)
    arguments.output.write_text(json.dumps(phase_to_document(results)))


if __name__ == "__main__":
    sys.exit(main())
