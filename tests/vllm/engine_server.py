"""vLLM engines, each in processes of its own: `python -m tests.vllm.engine_server SOCKET`, until its stdin ends.

Each connection gets an engine. Its first line is vLLM's arguments with `log` (a file), `kvpool` (an extra config; none
for plain vLLM) and `asynchronous`; then come commands, one a line, answered by `id` in the order in which they end. All
processes of an engine are forked from this one, which has imported vLLM: that takes ten seconds, three times an engine,
when each of its processes is spawned, as vLLM's CPU platform wants it. The API server that test_server.py starts does
that.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
CUDA = os.environ.get("KVPOOL_VLLM_DEVICE") == "cuda"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    **({"VLLM_WORKER_MULTIPROC_METHOD": "fork"} if CUDA else CPU),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
}
_ASYNCHRONOUS = "KVPOOL_TEST_ASYNCHRONOUS"  # in the environment of an engine's processes
_LINE_BYTES_MAX = 1 << 26
_SPIN_S = 50e-6
_COUNTED = ("kvpool", "preempt", "kv_cache_usage", "spec_decode")  # in the names of metrics


def main() -> None:
    """Serve until stdin ends."""
    os.environ.update(ENVIRONMENT)
    if "TRITON_INTERPRET" in os.environ:
        _have_model_runner_v2()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    _import_all()
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for an engine
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in readable:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _become_engine(connection)
        connection.close()


def _import_all() -> None:
    """Whatever an engine's processes would import, and what is needed to fork them."""
    import vllm.model_executor.models.llama
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor  # noqa: F401
    from vllm.distributed.device_communicators import shm_broadcast

    import kvpool.connectors.vllm.connector  # noqa: F401

    # vLLM's processes spin on sched_yield() for a second after each step. Several engines on two cores then held up
    # every other process for seconds (up to 7, seen on Linux 6.18: ready to run, and not scheduled).
    shm_broadcast.sched_yield = lambda: time.sleep(_SPIN_S)
    if not CUDA:
        _prepare_cpu_build()


def _prepare_cpu_build() -> None:
    """Have it fork, and take what its kernels can do and refuse what they cannot."""
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    configure = CpuPlatform.check_and_update_config

    def configure_to_fork(vllm_config: Any) -> None:
        configure(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if _ASYNCHRONOUS in os.environ:  # which vLLM's CPU platform takes to be of no use, and switches off
            vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(configure_to_fork)
    # vLLM 0.32's CPU backend says that it has no blocks of 16 tokens, although its kernels do.
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])
    # Its Mamba 2 layers promise checkpoints inside of a step, which its kernels do not make: the engine dies of it.
    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def _have_model_runner_v2() -> None:
    """Have vLLM's CPU build run it: its kernels are written in Triton, of which the interpreter serves as backend."""
    from triton.backends import backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends.clear()
    backends["cpu"] = SimpleNamespace(driver=Driver)

    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from kvpool.connectors.vllm import identity, wiring

    initialize = GPUModelRunner.initialize_kv_cache

    def initialize_twice(runner: Any, kv_cache_config: Any, *arguments: Any, **more: Any) -> None:
        initialize(runner, kv_cache_config, *arguments, **more)
        runner.model_state.initialize_kv_cache(runner.kv_cache_config, runner.block_tables)

    # It notes addresses of recurrent state before the connector moves a CPU's memory, which a GPU's stays in.
    GPUModelRunner.initialize_kv_cache = initialize_twice

    def kv_cache_infos(vllm_config: Any, kv_cache_config: Any) -> Any:
        return identity.kv_cache_infos(_AsOfRunnerV1(vllm_config), kv_cache_config)

    of_connector: Any = wiring
    of_connector.kv_cache_infos = kv_cache_infos


class _AsOfRunnerV1:
    """The VllmConfig of an engine with model runner V2, without a word of that: kvpool refuses it on a CPU."""

    use_v2_model_runner = False

    def __init__(self, vllm_config: Any) -> None:
        self._vllm_config = vllm_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vllm_config, name)


def _become_engine(connection: socket.socket) -> None:
    """Never returns."""
    code = 1
    try:
        os.setpgid(0, 0)  # so that a test can kill all of the engine's processes
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asyncio.run(_serve(connection))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=_LINE_BYTES_MAX)
    config = json.loads(await reader.readline())
    log = os.open(config.pop("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if config.pop("asynchronous", False):
        os.environ[_ASYNCHRONOUS] = "1"
    _answer(writer, {"id": 0, "pid": os.getpid()})
    await writer.drain()
    events = (config.get("kv_events_config") or {}).get("endpoint", "")
    served = _Served(_engine(config), writer, _Events(events) if events else None)
    _answer(writer, {"id": 1})
    while line := await reader.readline():
        served.begin(json.loads(line))
    served.engine.shutdown()


def _answer(writer: asyncio.StreamWriter, document: Mapping[str, Any]) -> None:
    writer.write(json.dumps(document).encode() + b"\n")


def _engine(config: dict[str, Any]) -> Any:
    from vllm.config.kv_events import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    extra = config.pop("kvpool", None)
    if extra is not None:
        config["kv_transfer_config"] = {
            "kv_connector": "KvPoolConnector",
            "kv_connector_module_path": "kvpool.connectors.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    if config.get("kv_events_config"):
        config["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, **config["kv_events_config"])
    arguments = AsyncEngineArgs(
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        worker_extension_cls="tests.vllm.worker_probe.WorkerProbe",
        **{"max_model_len": 4096, **config},
    )
    return AsyncLLM.from_engine_args(arguments)


class _Events:
    """What vLLM publishes, as anyone who subscribes gets it."""

    def __init__(self, endpoint: str) -> None:
        import zmq.asyncio

        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"")
        self.heard: list[dict[str, Any]] = []
        self._task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while True:
            _, _, payload = await self._socket.recv_multipart()
            for event in decoder.decode(payload).events:
                named = {field: getattr(event, field) for field in event.__struct_fields__}
                self.heard.append({"kind": type(event).__name__, **named})


class _Served:
    """An engine and the commands it is at."""

    def __init__(self, engine: Any, writer: asyncio.StreamWriter, events: _Events | None) -> None:
        self.engine, self._writer, self._events = engine, writer, events
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def begin(self, command: Mapping[str, Any]) -> None:
        """Answered some time."""
        self._tasks[command["id"]] = asyncio.create_task(self._run(command))

    async def _run(self, command: Mapping[str, Any]) -> None:
        try:
            found = await getattr(self, f"_{command['op']}")(command)
        except asyncio.CancelledError:
            found = {"error": "aborted"}
        except Exception as error:
            found = {"error": repr(error)}
        del self._tasks[command["id"]]
        _answer(self._writer, {"id": command["id"], **found})

    async def _generate(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Greedy tokens of each prompt, and how long all of them took together."""
        started_s = time.perf_counter()
        outputs = await asyncio.gather(
            *(self._one(command, number, prompt) for number, prompt in enumerate(command["prompts"]))
        )
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "cached": [output.num_cached_tokens for output in outputs],
            "seconds": time.perf_counter() - started_s,
        }

    async def _one(self, command: Mapping[str, Any], number: int, prompt: list[int]) -> Any:
        from vllm import SamplingParams

        parameters = SamplingParams(
            max_tokens=command["max_tokens"], temperature=0.0, detokenize=False, ignore_eos=True
        )
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if command.get("salt"):
            given["cache_salt"] = command["salt"]
        outputs = [one async for one in self.engine.generate(given, parameters, f"{command['id']}-{number}")]
        return outputs[-1]

    async def _abort(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """A generation that is under way, as a client that goes away does."""
        task = self._tasks.get(command["target"])
        if task is not None:
            task.cancel()
        return {}

    async def _reset(self, command: Mapping[str, Any]) -> dict[str, Any]:
        return {"reset": await self.engine.reset_prefix_cache()}

    async def _probe(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """A method of WorkerProbe on all ranks."""
        return {"ranks": await self.engine.collective_rpc(command["method"], args=tuple(command["arguments"]))}

    async def _published(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """All events so far, bytes in hexadecimal."""
        assert self._events is not None
        return {"events": json.loads(json.dumps(self._events.heard, default=bytes.hex))}

    async def _counters(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """kvpool's counters, those of preemption and drafts, and the share of blocks in use, by name."""
        from prometheus_client import REGISTRY  # vLLM's own snapshot cuts seconds to whole ones

        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            if family.type in ("counter", "gauge") and any(part in family.name for part in _COUNTED):
                values = (sample.value for sample in family.samples if not sample.name.endswith("_created"))
                found[family.name.removeprefix("vllm:")] = sum(values)
        return {"counters": found}


if __name__ == "__main__":
    main()
