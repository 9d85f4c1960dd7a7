"""The demo as `make demo` runs it, on a tiny model: its verdict, its refusals, and what it leaves when interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.tokenizer import TOKENIZER_PATH
from kvpool.testing import eventually_sync
from kvpool_cli.state import ClusterState, read_state
from tests.unit.connectors.tiny_models import tiny

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).resolve().parents[2]


def save_model(directory: Path, model_class: str = "LlamaForCausalLM", config_class: str = "LlamaConfig") -> Path:
    """A tiny model with the demo's tokenizer, as `--model` takes it."""
    from transformers import PreTrainedTokenizerFast

    settings = {"vocab_size": 4096, "max_position_embeddings": 8192, "num_attention_heads": 8, "num_key_value_heads": 4}
    tiny(model_class, config_class, **settings).save_pretrained(directory)
    PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER_PATH)).save_pretrained(directory)
    return directory


@contextmanager
def demo(model: Path, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A running demo, ended whatever happens."""
    paths = ["--model", str(model), "--state-dir", str(directory / "state"), "--result", str(directory / "demo.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "demo.run", *paths, "--conversations", "2", "--turns", "2"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=120)


@pytest.mark.timeout(600)  # two clusters and four engines, one after the other: a minute and more of processor time
def test_all_phases_on_a_model_from_a_directory(tmp_path: Path) -> None:
    with demo(save_model(tmp_path / "model"), tmp_path) as process:
        table, progress = process.communicate(timeout=570)
    assert process.returncode == 0, progress
    document = json.loads((tmp_path / "demo.json").read_text())
    phases = {phase["name"]: phase for phase in document["phases"]}
    assert list(phases) == ["cold", "shared", "restart", "reference"]
    assert all(phase["tokens_equal"] for phase in phases.values())
    assert phases["cold"]["prompt_tokens"]["remote"] == phases["cold"]["prompt_tokens"]["disk"] == 0
    # The first conversation: what comes after it this model may compute quicker than load.
    assert phases["shared"]["prompt_tokens"]["remote"] > 1500
    assert phases["restart"]["prompt_tokens"]["disk"] > 1500
    assert [line.split()[0] for line in table.splitlines()[2:]] == list(phases)
    assert "[16/16] reference" in progress
    assert read_state(tmp_path / "state") is None


def test_a_model_of_recurrent_layers_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with demo(save_model(tmp_path / "model", "MambaForCausalLM", "MambaConfig"), tmp_path) as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    (line,) = [line for line in said.splitlines() if line.startswith("demo: ")]
    assert "(MambaForCausalLM) has linear-attention or state-space layers" in line
    assert not (tmp_path / "state" / "logs" / "up.log").exists()
    assert not (tmp_path / "demo.json").exists()


@pytest.mark.parametrize(("number", "when"), [(signal.SIGINT, "running"), (signal.SIGTERM, "starting")])
def test_an_interrupted_demo_leaves_no_process(tmp_path: Path, number: signal.Signals, when: str) -> None:
    reached = {"running": running, "starting": read_state}[when]
    with demo(save_model(tmp_path / "model"), tmp_path) as process:
        state = eventually_sync(lambda: reached(tmp_path / "state"), deadline_s=180)
        assert state is not None
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said.splitlines()[-1] == "demo: interrupted"
    assert not any(one.alive() for one in state.processes)
    assert not state.supervised()
    assert read_state(tmp_path / "state") is None


def running(state_dir: Path) -> ClusterState | None:
    """The state once everything serves and the first engine has begun."""
    state = read_state(state_dir)
    begun = (state_dir / "logs" / "engine-cold.log").exists()
    return state if state is not None and state.ready and begun else None
