"""vLLM engines in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import Cluster
from tests.vllm.models import VOCABULARY

VLLM_PYTHON_VARIABLE = "KVPOOL_VLLM_PYTHON"  # the interpreter that has vLLM
DEVICE = os.environ.get("KVPOOL_VLLM_DEVICE", "cpu")  # "cuda": the interpreter has vLLM for CUDA
REPOSITORY = Path(__file__).resolve().parents[2]
CHUNK = 128
# Of kvpool in tests: what is in the pool is loaded, however busy the machine is.
PATIENT = {"load": "always", "match_timeout_s": 30.0, "load_timeout_s": 60.0, "load_timeout_min_s": 60.0}
KV_CACHE_BYTES = 1 << 30  # of an engine on a GPU, which many share
_ON_A_GPU = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": KV_CACHE_BYTES,
    # The default are kernels of FlashInfer, which are compiled when they are first used.
    "additional_config": {"gdn_prefill_backend": "triton"},
}
_START_S = 180.0  # on a machine that has other work
_ANSWER_S = 120.0
_END_S = 180.0  # model runner V2 takes minutes in Triton's interpreter on a busy machine


def prompt(token_count: int, seed: int) -> list[int]:
    """Random token ids."""
    tokens: list[int] = np.random.default_rng(seed).integers(1, VOCABULARY, token_count).tolist()
    return tokens


def vllm_environment() -> dict[str, str]:
    """Of a process of vLLM's interpreter that imports kvpool and these tests."""
    return {
        # On a GPU, Triton multiplies float32 in TF32 by default, and rounds by what else is in a step: decoding beside
        # a prefill is another kernel. Then plain vLLM, too, gives one request of a hundred other tokens than alone.
        "TRITON_F32_DEFAULT": "ieee",
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'clients/python'}",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # stdout is for answers
        # Else each engine on a GPU times the kernels of recurrent layers for itself, and may choose ones that round
        # in another way: tokens would differ.
        "TRITON_CACHE_AUTOTUNING": "1",
    }


@dataclass(frozen=True, slots=True)
class Generated:
    """Of some prompts. cached: prompt tokens that were not computed, from wherever they came."""

    tokens: list[list[int]]
    cached: list[int]
    seconds: float


class Engines:
    """Starts engines by forking a process that has imported vLLM; ends with the `with` block, and they with it."""

    def __init__(self, model: Path, *, model_runner_v2: bool = False) -> None:
        """model_runner_v2: vLLM's default on GPUs. On a CPU it needs Triton's interpreter."""
        self._model, self._started = model, 0
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "1"} if model_runner_v2 else {}
        if model_runner_v2 and DEVICE != "cuda":
            runner["TRITON_INTERPRET"] = "1"
        self._run_dir = tempfile.TemporaryDirectory(prefix="kvpool-vllm-")  # a socket's path must be short
        self._socket = Path(self._run_dir.name) / "engines.sock"
        self._log = (model / "engines.log").open("w+b")
        self._process = subprocess.Popen(
            [os.environ[VLLM_PYTHON_VARIABLE], "-m", "tests.vllm.engine_server", str(self._socket)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**vllm_environment(), **runner},
            cwd=REPOSITORY,
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", (self._model / "engines.log").read_text()[-3000:]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(_END_S)
        self._process.stdout.close()
        self._log.close()
        self._run_dir.cleanup()

    def start(
        self,
        *,
        agent: str = "",
        extra: dict[str, Any] | None = None,
        as_shipped: bool = False,
        events: bool = False,
        **arguments: Any,
    ) -> Engine:
        """agent: of kvpool; empty for plain vLLM. as_shipped: kvpool decides by its own defaults whether to load.
        events: publish them. arguments: of vLLM's engine."""
        config: dict[str, Any] = {
            "model": str(self._model),
            "dtype": "float32",
            "block_size": 32,
            "num_gpu_blocks_override": 6144 // arguments.get("block_size", 32),
            **(_ON_A_GPU if DEVICE == "cuda" else {}),
            **arguments,
        }
        if agent:
            config["kvpool"] = {
                "agent": agent,
                "model_id": "tiny",
                "chunk_tokens": CHUNK,
                **({} if as_shipped else PATIENT),
                **(extra or {}),
            }
        self._started += 1
        if events:
            config["kv_events_config"] = {"endpoint": f"ipc://{self._run_dir.name}/events-{self._started}"}
        return Engine(self._socket, config, self._model / f"engine-{self._started}.log")


class Engine:
    """One engine; ends with the `with` block."""

    def __init__(self, server: Path, config: Mapping[str, Any], log: Path) -> None:
        self._log, self._numbers, self._answers = log, 1, dict[int, dict[str, Any]]()
        self._pid = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_START_S)
        self._socket.connect(str(server))
        self._lines = self._socket.makefile("rb")
        self._send({**config, "log": str(log)})

    def __enter__(self) -> Self:
        try:
            self._pid = self._answer(0)["pid"]
            self._answer(1)
        except BaseException:
            self.kill()
            raise
        self._socket.settimeout(_ANSWER_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # it may be killed
            self._socket.shutdown(socket.SHUT_WR)
        with suppress(AssertionError):
            eventually_sync(lambda: not Path(f"/proc/{self._pid}").exists(), deadline_s=_END_S)
        self.kill()

    def kill(self) -> None:
        """All of its processes, at once."""
        if self._pid:
            left = _shared_memory(self._pid)
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            for path in left:
                path.unlink(missing_ok=True)
            self._pid = 0
        self._lines.close()
        self._socket.close()

    def generate(self, *prompts: Sequence[int], new_tokens: int = 12, salt: str = "") -> Generated:
        """Greedy, all prompts at once."""
        return self.generated(self.begin(*prompts, new_tokens=new_tokens, salt=salt))

    def begin(self, *prompts: Sequence[int], new_tokens: int = 12, salt: str = "") -> int:
        """Begin to generate; `generated` waits for the end of what has the returned number."""
        asked = {"prompts": [list(one) for one in prompts], "max_tokens": new_tokens, "salt": salt}
        return self._ask("generate", **asked)

    def generated(self, number: int) -> Generated:
        """What was begun."""
        return Generated(**self._found(number))

    def abort(self, number: int) -> None:
        """What was begun and has not ended, as the server does for a client that has gone away."""
        assert self.leave(number)

    def leave(self, number: int) -> bool:
        """Abort what was begun; False if it had ended. Returns when the engine has been told."""
        self._found(self._ask("abort", target=number))
        return bool(self._answer(number).get("error") == "aborted")

    def probe(self, method: str, *arguments: Any) -> list[Any]:
        """A method of WorkerProbe: what each rank answers."""
        answers: list[Any] = self._found(self._ask("probe", method=method, arguments=arguments))["ranks"]
        return answers

    def published(self) -> list[dict[str, Any]]:
        """vLLM's KV events so far; bytes are in hexadecimal. Of an engine that was started with `events=True`."""
        events: list[dict[str, Any]] = self._found(self._ask("published"))["events"]
        return events

    def counters(self) -> dict[str, float]:
        """kvpool's counters so far."""
        self.generate([5, 6, 7], new_tokens=2)  # counters of the last step come with the next
        found: dict[str, float] = self._found(self._ask("counters"))["counters"]
        return {name.removeprefix("kvpool_"): value for name, value in found.items()}

    def await_stored(self, chunk_count: int) -> None:
        """Wait until so many chunks in all are in the pool; an idle engine hears of it with its next request."""
        eventually_sync(lambda: self.counters().get("stored_chunks", 0) >= chunk_count, deadline_s=_END_S)

    def forget(self) -> None:
        """Drop what the engine itself holds of prefixes, as soon as no store needs its blocks."""

        def forgotten() -> bool:
            self.generate([5, 6, 7], new_tokens=2)  # an idle engine gives no blocks back
            return bool(self._found(self._ask("reset"))["reset"])

        eventually_sync(forgotten, deadline_s=_END_S)

    def log(self) -> str:
        """What the engine said."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def _ask(self, operation: str, **arguments: Any) -> int:
        self._numbers += 1
        self._send({"id": self._numbers, "op": operation, **arguments})
        return self._numbers

    def _send(self, command: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(command).encode() + b"\n")

    def _found(self, number: int) -> dict[str, Any]:
        answer = self._answer(number)
        assert "error" not in answer, f"{answer['error']}\n{self.log()[-3000:]}"
        return answer

    def _answer(self, number: int) -> dict[str, Any]:
        while number not in self._answers:
            try:
                line = self._lines.readline()
            except TimeoutError:
                raise AssertionError(f"the engine does not answer:\n{self.log()[-3000:]}") from None
            assert line, f"the engine ended:\n{self.log()[-3000:]}"
            answer: dict[str, Any] = json.loads(line)
            self._answers[answer.pop("id")] = answer
        return self._answers.pop(number)


def _shared_memory(group: int) -> set[Path]:
    """Named shared memory of vLLM's own in the processes of a group, which stays behind when they are killed."""
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end meanwhile
            if os.getpgid(int(process.name)) == group:
                words = (process / "maps").read_text().split()
                found |= {Path(word) for word in words if word.startswith("/dev/shm/psm_")}
    return found


def free_port() -> int:
    """Of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def agent_of(cluster: Cluster, number: int = 0) -> str:
    """Its endpoint."""
    return f"unix:{cluster.state.of_role('agent')[number].endpoints['socket']}"
