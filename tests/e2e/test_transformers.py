"""A Hugging Face model on a real cluster: shared prefixes, and processes that are killed under it."""

from __future__ import annotations

import os
import re
import runpy
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from demo.tokenizer import TOKENIZER_PATH
from kvpool.connectors.transformers import GenerationResult, SharedPrefixGenerator
from kvpool.core.errors import KeyspaceMismatch, KvPoolError
from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import SMALL, Cluster
from tests.fixtures.patience import PATIENCE_S
from tests.unit.connectors.tiny_models import padded, prompt, tiny_llama

pytestmark = pytest.mark.e2e

CHUNK = 16
NEW_TOKENS = 8
RECOVERY_S = 100.0
QUICK_START = Path(__file__).parents[2] / "docs" / "transformers.md"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts, each a pagestore and an agent."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    cluster.run("cluster", "up", "--pagestores", "2", "--detach", *SMALL)
    yield cluster
    cluster.run("cluster", "down")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def connect(cluster: Cluster, model: Any, agent: int = 0, **options: Any) -> SharedPrefixGenerator:
    socket = cluster.state.of_role("agent")[agent].endpoints["socket"]
    settings: dict[str, Any] = {
        "model_id": "tiny",
        "keyspace_name": "tiny-hf",
        "chunk_tokens": CHUNK,
        "cache_bytes": 4 << 20,
        "match_timeout_s": PATIENCE_S,
        "connect_timeout_s": PATIENCE_S,
        "always_load": True,  # how fast this machine computes is no matter here
        **options,
    }
    return SharedPrefixGenerator.connect(model, f"unix:{socket}", **settings)


def run(generator: SharedPrefixGenerator, input_ids: torch.Tensor) -> GenerationResult:
    return generator.generate(input_ids, max_new_tokens=NEW_TOKENS, do_sample=False)


def alone(model: Any, input_ids: torch.Tensor) -> list[int]:
    output = model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    tokens: list[int] = output[0].tolist()
    return tokens


def await_known(generator: SharedPrefixGenerator, input_ids: torch.Tensor, tokens: int) -> None:
    """Until the generator's agent has heard of what was stored, which is announced a little later."""
    eventually_sync(lambda: generator.available_tokens(input_ids) >= tokens, deadline_s=RECOVERY_S)


def kill(cluster: Cluster, role: str, number: int) -> int:
    """SIGKILL; the supervisor starts it again. Returns the pid that is gone."""
    pid = cluster.state.of_role(role)[number].pid
    os.kill(pid, signal.SIGKILL)
    return pid


def test_engines_on_one_host_and_on_two_share_a_prefix(cluster: Cluster, model: Any) -> None:
    input_ids = prompt(6 * CHUNK + 3, seed=1)
    expected = alone(model, input_ids)
    with connect(cluster, model) as first:
        cold = run(first, input_ids)
        assert first.flush_stores(PATIENCE_S)
        assert run(first, input_ids).stats.prompt_tokens.own == 6 * CHUNK
        eventually_sync(lambda: stored(first, cluster, model, input_ids), deadline_s=RECOVERY_S)
    with connect(cluster, model) as beside, connect(cluster, model, agent=1) as elsewhere:
        for engine in (beside, elsewhere):
            await_known(engine, input_ids, 6 * CHUNK)
        local, remote = run(beside, input_ids), run(elsewhere, input_ids)
    for result in (cold, local, remote):
        assert result.sequences[0].tolist() == expected
        assert result.stats.failure == ""
    assert cold.stats.prompt_tokens.recomputed == 6 * CHUNK + 3
    assert local.stats.prompt_tokens.staging == 6 * CHUNK
    assert remote.stats.prompt_tokens.remote == 6 * CHUNK


def test_a_padded_batch_is_shared_over_two_hosts(cluster: Cluster, model: Any) -> None:
    prefix = prompt(5 * CHUNK, seed=9)
    rows = [torch.cat([prefix, prompt(length, seed=length)], dim=1) for length in (12, 3, 7)]
    batch = padded(*rows, prompt(2 * CHUNK + 1, seed=10))
    expected = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False).tolist()
    with connect(cluster, model) as first:
        cold = first.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
        assert first.flush_stores(PATIENCE_S)
    with connect(cluster, model, agent=1) as elsewhere:
        await_known(elsewhere, rows[0], 5 * CHUNK)
        warm = elsewhere.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert cold.sequences.tolist() == warm.sequences.tolist() == expected
    assert (cold.stats.failure, warm.stats.failure) == ("", "")
    assert warm.stats.rows[0].remote == 5 * CHUNK
    assert sum(row.remote for row in warm.stats.rows) <= 7 * CHUNK  # the prefix was loaded for its first row


def test_the_quick_start_does_what_it_says(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/transformers.md, with a model of random weights in the place of the one it names."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER_PATH))
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(tmp_path)
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    script = tmp_path / "ask.py"
    script.write_text(QUICK_START.read_text().split("```python\n")[1].split("```")[0])
    socket = cluster.state.of_role("agent")[0].endpoints["socket"]
    monkeypatch.setattr(sys, "argv", ["ask.py", str(tmp_path), f"unix:{socket}"])
    # The script keeps the defaults of production, by which an engine computes when this machine stands still.
    patient = partial(SharedPrefixGenerator.connect, match_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)
    monkeypatch.setattr(SharedPrefixGenerator, "connect", patient)

    def shown() -> str:
        runpy.run_path(str(script))
        text = capsys.readouterr().out
        assert "kvpool: fine" in text
        return text

    assert "staging=0, disk=0, remote=0" in shown().splitlines()[0]
    eventually_sync(lambda: re.search(r"staging=[1-9]", shown()), deadline_s=RECOVERY_S)  # once it is announced


def test_a_name_that_means_another_geometry_is_refused(cluster: Cluster, model: Any) -> None:
    with connect(cluster, model):
        pass
    with pytest.raises(KeyspaceMismatch, match="chunk_tokens"):
        connect(cluster, model, chunk_tokens=2 * CHUNK)


def test_an_agent_killed_under_an_engine_costs_recomputing_only(cluster: Cluster, model: Any) -> None:
    before, after = prompt(5 * CHUNK, seed=2), prompt(5 * CHUNK, seed=3)
    with connect(cluster, model) as generator:
        run(generator, before)
        assert generator.flush_stores(PATIENCE_S)
        kill(cluster, "agent", 0)
        assert run(generator, after).sequences[0].tolist() == alone(model, after)
        # What could not be stored is stored with a later request, once the agent is back.
        eventually_sync(lambda: stored(generator, cluster, model, after), deadline_s=RECOVERY_S)


def stored(generator: SharedPrefixGenerator, cluster: Cluster, model: Any, input_ids: torch.Tensor) -> bool:
    """Whether another engine finds the prompt after one more request of the first."""
    run(generator, input_ids)
    generator.flush_stores(PATIENCE_S)
    with connect(cluster, model, agent=1) as other:
        try:
            return other.available_tokens(input_ids) >= 5 * CHUNK
        except KvPoolError:
            return False


def test_a_pagestore_killed_under_an_engine_costs_recomputing_only(cluster: Cluster, model: Any) -> None:
    before, after = prompt(5 * CHUNK, seed=4), prompt(5 * CHUNK, seed=5)
    with connect(cluster, model) as generator:
        run(generator, before)
        assert generator.flush_stores(PATIENCE_S)
        kill(cluster, "pagestore", 0)
        assert run(generator, after).sequences[0].tolist() == alone(model, after)
        assert run(generator, before).sequences[0].tolist() == alone(model, before)
        eventually_sync(lambda: stored(generator, cluster, model, after), deadline_s=RECOVERY_S)


def test_a_hung_agent_delays_a_request_by_little(cluster: Cluster, model: Any) -> None:
    before, after = prompt(5 * CHUNK, seed=7), prompt(5 * CHUNK, seed=8)
    with connect(cluster, model, match_timeout_s=0.5) as generator:
        run(generator, before)
        assert generator.flush_stores(PATIENCE_S)
        pid = cluster.state.of_role("agent")[0].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            result = run(generator, after)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert result.sequences[0].tolist() == alone(model, after)
        assert "did not answer within 0.5 s" in result.stats.failure
        assert result.stats.match_ms < PATIENCE_S * 1e3  # which is longer than this machine stands still
        eventually_sync(lambda: stored(generator, cluster, model, after), deadline_s=RECOVERY_S)


def test_an_engine_starts_without_an_agent(cluster: Cluster, model: Any) -> None:
    input_ids = prompt(3 * CHUNK, seed=6)
    generator = SharedPrefixGenerator.connect(
        model, "unix:/nonexistent/agent.sock", model_id="tiny", chunk_tokens=CHUNK, cache_bytes=1 << 20
    )
    with generator:
        result = run(generator, input_ids)
        assert result.sequences[0].tolist() == alone(model, input_ids)
        assert result.stats.failure == "the pool cannot be reached"
        assert run(generator, input_ids).stats.prompt_tokens.own == 2 * CHUNK
