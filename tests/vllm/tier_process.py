"""vLLM's own offloading manager with kvpool's tier, by vLLM's interpreter: `python -m tests.vllm.tier_process`.

A line of stdin is a command, a line of stdout its answer. What a scheduler and its workers do is played: a chunk's
bytes are those of its number and its group, written where vLLM says.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

GROUPS = 2
_STEP_PAUSE_S = 0.001  # as an engine core that has nothing to compute


class Server:
    """One vLLM server's manager, as its scheduler calls it."""

    def __init__(
        self,
        engine_id: str,
        printed: str,
        tier: dict[str, Any],
        chunk_count: int,
        chunk_bytes: int,
        tp: int,
        canonical: bool,
        engine: dict[str, Any] | None,
    ) -> None:
        """printed: of --kv-transfer-config. tier: what is changed of its secondary tier. engine: see `_engine`; None:
        no connector is given configurations, which vLLM's always is."""
        self.chunk_bytes = chunk_bytes
        transfer = KVTransferConfig(**json.loads(printed))
        assert KVConnectorFactory.get_connector_class(transfer) is OffloadingConnector
        extra = transfer.kv_connector_extra_config
        extra["cpu_bytes_to_use"] = chunk_count * chunk_bytes
        extra["secondary_tiers"][0].update(tier)
        self.metrics = OffloadingSpecFactory.get_spec_cls(extra).build_metric_definitions(extra)
        spec = OffloadingSpecFactory.create_spec(_config(engine_id, extra, chunk_bytes // tp, tp, canonical))
        self.manager: Any = spec.get_manager() if engine is None else _connector(spec, *_engine(tp, **engine))
        self.chunk_count = self.manager.primary_tier._num_chunks  # noqa: SLF001  # vLLM has no public one
        self._requests = 0
        self._stats: dict[str, float] = {}

    def begin_store(self, seed: int, first: int, count: int, params: dict[str, Any] | None = None) -> None:
        """What the GPU has computed reaches the CPU region, and is offered to the tier."""
        request, keys = self.new_request(params), chunk_keys(seed, first, count)
        prepared = self.manager.prepare_store(keys, request)
        assert prepared is not None, "vLLM's region has no room"
        view = self.manager.primary_tier.get_kv_memoryview()
        slots = np.asarray(view)
        for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids, strict=True):
            slots[chunk] = _content(key, self.chunk_bytes)
        if prepared.keys_to_store:
            self.manager.complete_store(prepared.keys_to_store, request)
        self.manager.on_request_finished(request)

    def store(self, seed: int, first: int, count: int, params: dict[str, Any] | None = None) -> dict[str, float]:
        self.begin_store(seed, first, count, params)
        return self.settle()

    def settle(self) -> dict[str, float]:
        """Step until no job is left; counters so far."""
        while self.manager.has_pending_work():
            self.step()
        self.step()
        return self.stats()

    def look_up(self, seed: int, first: int, count: int, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """As a request that waits: until each chunk is in the region or a miss. Then what is in the region is read."""
        request, keys = self.new_request(params), chunk_keys(seed, first, count)
        answers: dict[OffloadKey, LookupResult] = {}
        steps = 0
        while len(answers) < len(keys):
            for key in keys:
                if key not in answers:
                    answer = self.manager.lookup(key, request)
                    if answer in (LookupResult.HIT, LookupResult.MISS):
                        answers[key] = answer
            self.step()
            steps += 1
        hits = [key for key in keys if answers[key] is LookupResult.HIT]
        equal = controls = 0
        if hits:
            chunks = self.manager.prepare_load(hits, request).chunk_ids
            slots = np.asarray(self.manager.primary_tier.get_kv_memoryview())
            for key, chunk in zip(hits, chunks, strict=True):
                equal += bool(np.array_equal(slots[chunk], _content(key, self.chunk_bytes)))
                controls += bool(np.array_equal(slots[chunk], _content(_other(key), self.chunk_bytes)))
            self.manager.complete_load(hits, request)
        self.manager.on_request_finished(request)
        self.step()
        return {"hits": len(hits), "equal": equal, "controls": controls, "steps": steps}

    def begin_load(self, seed: int, first: int, count: int) -> int:
        """As a request that leaves once its chunks are on their way into the region; how many are."""
        request, answers = self.new_request(), [LookupResult.RETRY]
        while LookupResult.RETRY in answers:
            answers = [self.manager.lookup(key, request) for key in chunk_keys(seed, first, count)]
            self.step()
        self.manager.on_request_finished(request)
        return answers.count(LookupResult.HIT_PENDING)

    def forget(self) -> None:
        """Fill the region with other chunks, so that vLLM evicts all that was there."""
        self._requests += 1
        for first in range(0, self.chunk_count, 4):
            self.store(1_000_000 + self._requests, first, min(4, self.chunk_count - first))

    def reset(self) -> dict[str, float]:
        """As before a weight update, with jobs that may be running."""
        self.manager.reset_cache()
        self.step()
        return self.stats()

    def events(self) -> list[list[Any]]:
        return [[len(event.keys), event.medium.name, event.removed] for event in self.manager.take_events()]

    def stats(self) -> dict[str, float]:
        """All counters since the start, without their prefix."""
        stats = self.manager.get_stats()
        if stats is not None:
            values_by_name, types = stats._values, stats._types  # noqa: SLF001  # vLLM's, which has no public ones
            for name, values in values_by_name.items():
                if types[name] == "counter":
                    assert name in self.metrics, name
                    short = name.removeprefix("vllm:kvpool_tier_").removeprefix("vllm:kv_offload_tiering_")
                    self._stats[short] = self._stats.get(short, 0) + sum(values.values())
        return self._stats

    def close(self) -> None:
        self.manager.shutdown()

    def new_request(self, params: dict[str, Any] | None = None) -> ReqContext:
        """One that the manager knows of. params: its `kv_transfer_params`."""
        self._requests += 1
        request = ReqContext(req_id=f"request {self._requests}", kv_transfer_params=params)
        self.manager.on_new_request(request)
        return request

    def step(self) -> None:
        """As the scheduler ends one."""
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        time.sleep(_STEP_PAUSE_S)


def _config(engine_id: str, extra: dict[str, Any], block_bytes: int, tp: int, canonical: bool) -> OffloadingConfig:
    return OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(16, (f"layer.{group}",), group) for group in range(GROUPS)),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=True,
        extra_config=extra,
        engine_id=engine_id,
        model=OffloadingModelConfig(name="org/model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=tp,
            tp_size=tp,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=canonical,
        ),
        canonical_layout=canonical,
        kv_cache_layout="LBNHC",
    )


def _connector(spec: Any, vllm_config: Any, kv_cache_config: Any) -> Any:
    """As vLLM's creates the manager: a tier reads the configurations that it was given."""
    return spec.get_manager()


def _engine(
    tp: int, *, max_model_len: int = 4096, overrides: Any = None, rope: Any = None, conv: str = "", heads: int = 8
) -> tuple[Any, Any]:
    """What is read of a VllmConfig, and a KVCacheConfig of two groups. conv: how a convolution's state is arranged, in
    a group of recurrent state."""
    values = {"rope_parameters": rope or {"rope_theta": 1e4}}
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        quantization=None,
        use_mla=False,
        hf_overrides=overrides or {},
        hf_config=SimpleNamespace(),
        hf_text_config=SimpleNamespace(to_dict=lambda: values, **values),
        max_model_len=max_model_len,
        original_max_model_len=max_model_len,
    )
    load = SimpleNamespace(load_format="auto")
    specs: list[Any] = [
        FullAttentionSpec(block_size=16, num_kv_heads=heads // tp, head_size=64, dtype=torch.bfloat16)
    ] * 2
    if conv:
        shape = (3, 512) if conv == "SD" else (512, 3)
        specs[1] = MambaSpec(block_size=16, shapes=(shape, (4, 64)), dtypes=(torch.bfloat16, torch.float32))
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return (
        SimpleNamespace(model_config=model, load_config=load, speculative_config=None),
        SimpleNamespace(kv_cache_groups=groups),
    )


def chunk_keys(seed: int, first: int, count: int) -> list[OffloadKey]:
    """The same chunk of all groups has one hash."""
    root = kv_cache_utils.NONE_HASH
    return [
        make_offload_key(hashlib.sha256(root + b"%d %d" % (seed, number // GROUPS)).digest(), number % GROUPS)
        for number in range(first, first + count)
    ]


def _other(key: OffloadKey) -> OffloadKey:
    """The same tokens' chunk of the other group."""
    return make_offload_key(key[:-4], 1 - key[-1])


def _content(key: OffloadKey, chunk_bytes: int) -> np.ndarray[Any, np.dtype[np.int8]]:
    seed = int.from_bytes(hashlib.sha256(key).digest()[:8])
    return np.random.default_rng(seed).integers(-128, 128, chunk_bytes, np.int8)


def init_hashes() -> None:
    """As an engine does before its first request."""
    kv_cache_utils.init_none_hash(sha256)


def main() -> None:
    """Serve until stdin ends. `open` makes a server of a name; all else is a method of one."""
    init_hashes()
    servers: dict[str, Server] = {}
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        name, command, arguments = asked["server"], asked["command"], asked["arguments"]
        try:
            if command == "open":
                servers[name] = Server(**arguments)
                answer = None
            else:
                answer = getattr(servers[name], command)(**arguments)
        except Exception as error:  # the test's to judge
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), flush=True)
            continue
        print(json.dumps({"answer": answer}), flush=True)


if __name__ == "__main__":
    main()
