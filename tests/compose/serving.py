"""The demo's engine, serving until it is asked to end, in a container of its own: `python - AGENT` with this on stdin.

One line of JSON a request: whether its tokens are those that the model generates without kvpool, where the prompt came
from, and what kvpool could not do. A request that ended with an exception is a line with "error". Every fourth prompt
is new to everybody, so that stores go on; the others are the same ones again, which the engine forgets each time.
"""

import json
import signal
import sys
import threading
from dataclasses import asdict

import torch

from demo.engine import CHUNK_TOKENS, Generate, plain, warm_up
from demo.model import DemoModel, build_model
from demo.workload import load_workload, render_context
from kvpool.connectors.first_token import FirstTokenTimer
from kvpool.connectors.transformers import SharedPrefixGenerator

PROMPT_TOKENS = 320
REPLY_TOKENS = 8
KNOWN_PROMPTS = 3
NEW_PROMPT_EVERY = 4


def replies_of(generate: Generate, prompt: torch.Tensor) -> tuple[list[int], dict[str, int], float | None]:
    timer = FirstTokenTimer()
    sequences, prompt_tokens = generate(prompt, REPLY_TOKENS, timer)
    return sequences[0, prompt.shape[1] :].tolist(), asdict(prompt_tokens), timer.at_s


def prompts_of(model: DemoModel) -> list[torch.Tensor]:
    contexts = [render_context(conversation, model.tokenizer) for conversation in load_workload().conversations]
    return [torch.tensor([context[:PROMPT_TOKENS]], dtype=torch.long) for context in contexts[:KNOWN_PROMPTS]]


def new_prompt(known: torch.Tensor, number: int) -> torch.Tensor:
    """The known one with other first tokens: no chunk of it is known."""
    vocabulary = 256
    prompt = known.clone()
    prompt[0, :2] = torch.tensor([number % vocabulary, number // vocabulary % vocabulary])
    return prompt


def main() -> None:
    agent, first_new = sys.argv[1], int(sys.argv[2])
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ending.set())
    torch.set_num_threads(1)
    model = build_model(None, 0)
    warm_up(model)
    known = prompts_of(model)
    wanted = [replies_of(plain(model), prompt)[0] for prompt in known]
    generator = SharedPrefixGenerator.connect(
        model.model,
        agent,
        model_id=model.name,
        model_revision=model.revision,
        keyspace_name="compose-serving",
        chunk_tokens=CHUNK_TOKENS,
        cache_bytes=1 << 28,
        engine_name="serving",
        always_load=True,
    )
    print(json.dumps({"serving": True}), flush=True)
    number = 0
    with generator:
        while not ending.is_set():
            turn, is_new = number % KNOWN_PROMPTS, number % NEW_PROMPT_EVERY == NEW_PROMPT_EVERY - 1
            prompt = new_prompt(known[turn], first_new + number) if is_new else known[turn]
            expected = replies_of(plain(model), prompt)[0] if is_new else wanted[turn]
            generator.forget()
            said: dict[str, object] = {"new": is_new}
            try:
                result = generator.generate(prompt, max_new_tokens=REPLY_TOKENS, do_sample=False)
            except Exception as error:
                said["error"] = f"{type(error).__name__}: {error}"
            else:
                stats = result.stats
                said["equal"] = result.sequences[0, prompt.shape[1] :].tolist() == expected
                said |= {
                    "tokens": asdict(stats.prompt_tokens),
                    "ttft_ms": round(stats.ttft_ms),
                    "failure": stats.failure,
                }
            print(json.dumps(said), flush=True)
            number += 1
    print(json.dumps({"ended": True}), flush=True)


main()
