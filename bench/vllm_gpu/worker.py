"""What the bench does inside an engine's worker; vLLM mixes BenchWorker into its own class (worker_extension_cls).

With one rank, worker and scheduler share a process, and so do both sides of a connector. Nothing here is active, nor
costs a step anything, before its method was called.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvpool.connectors.vllm.tier.jobs import EndedJob, TierJobs

_COPY_BYTES = 64 << 20
_COPIES = 32
_POLL_S = 0.0005
_STORE_TIMEOUT_S = 60.0
_DUMMY_SPREAD = 1e-3 / 3**0.5  # of vLLM's dummy weights: uniform up to 1e-3


class BenchWorker:
    """Methods for LLM.collective_rpc. vLLM wants no name here that its own worker has."""

    def bench_memcpy(self) -> dict[str, float]:
        """GB/s of plain copies of 64 MiB, four in flight, between pinned memory and the GPU."""
        host = torch.empty(4 * _COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(4 * _COPY_BYTES, dtype=torch.uint8, device="cuda")
        return {"in": _copy_rate(device, host), "out": _copy_rate(host, device)}

    def bench_scale(self, spread: float) -> int:
        """Scale weights so that Q, K and V have that spread: with dummy ones no token attends to others."""
        count = 0
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        with torch.no_grad():
            for name, weights in runner.model.named_parameters():
                if name.endswith("input_layernorm.weight"):  # what makes Q, K and V may be packed otherwise by now
                    weights.fill_(spread / (_DUMMY_SPREAD * weights.numel() ** 0.5))
                    count += 1
                elif "norm" in name:
                    weights.fill_(1.0)
        return count

    def bench_watch(self, known: str) -> None:
        """From now on sum every block that was computed, and compare those that a request did not compute."""
        block_tokens = self.vllm_config.cache_config.block_size  # type: ignore[attr-defined]
        self._bench_watch_with(BlockWatch(self.model_runner, block_tokens, Path(known)))  # type: ignore[attr-defined]

    def bench_watched(self, save_to: str) -> dict[str, int]:
        """What the watch counted; the sums go to a file, for another engine."""
        watch: BlockWatch = self._bench_block_watch
        if save_to:
            watch.save(Path(save_to))
        return dict(watch.counts)

    def bench_watch_heads(self) -> None:
        """As bench_watch, but for each layer and head of the model, so that ranks of other degrees can be compared.

        Once for each engine: what others have saved meanwhile comes with bench_learn_heads.
        """
        start, _ = self.model_config.get_layers_start_end_indices(self.parallel_config)  # type: ignore[attr-defined]
        heads = self.model_config.get_num_kv_heads(self.parallel_config)  # type: ignore[attr-defined]
        tp_rank = self.rank % self.parallel_config.tensor_parallel_size  # type: ignore[attr-defined]
        self._bench_watch_with(
            HeadWatch(
                self.model_runner,  # type: ignore[attr-defined]
                self.vllm_config.cache_config.block_size,  # type: ignore[attr-defined]
                None,
                first_layer=start,
                first_head=heads * tp_rank,
            )
        )

    def bench_learn_heads(self, directory: str) -> None:
        """Take in all sums that other engines have saved there."""
        self._bench_block_watch.learn(Path(directory))

    def bench_heads_watched(self, directory: str) -> dict[str, int]:
        """As bench_watched; the sums go to a file of their own in the directory, if one is named."""
        watch: BlockWatch = self._bench_block_watch
        if directory:
            watch.save(Path(directory) / f"{os.getpid()}-{time.monotonic_ns()}.json")
        return dict(watch.counts)

    def bench_offer_none(self) -> None:
        """From now on no other engine copies what this one's GPU cache holds; later blocks are offered again."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        generations = get_kv_transfer_group()._worker._generations
        if generations is not None:
            generations.raise_all()

    def _bench_watch_with(self, watch: BlockWatch) -> None:
        run: Callable[[Any], Any] = self.execute_model  # type: ignore[has-type]

        def watched(scheduler_output: Any) -> Any:
            watch.handle_preemptions(scheduler_output)
            return run(scheduler_output)

        self.execute_model = watched
        self._bench_block_watch = watch

    def bench_zero(self, on: bool) -> None:
        """Whether blocks that a request did not compute are zeroed before it goes on."""
        self._bench_block_watch.zero = on

    def bench_store(self, requests: int, tokens: int) -> dict[str, float]:
        """Store blocks of the cache through the connector, under hashes of nothing, as the prompts of so many requests.

        Returns seconds from the orders until all chunks were committed, bytes and chunks. The engine must be idle.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        side = get_kv_transfer_group()._worker
        cache = self.vllm_config.cache_config  # type: ignore[attr-defined]
        return store_burst(side, requests, tokens, cache.block_size, cache.num_gpu_blocks)

    def bench_trace(self) -> None:
        """Record when vLLM calls which method of the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        group = get_kv_transfer_group()
        self._bench_calls = CallTrace(type(group), type(getattr(group, "_worker", None)))

    def bench_load_always(self) -> None:
        """From now on whatever the pool has is loaded, also where computing is quicker."""
        from kvpool.connectors.vllm.scheduler import ConnectorScheduler

        gc.unfreeze()  # vLLM hides from the collector what its start has made
        (side,) = (one for one in gc.get_objects() if isinstance(one, ConnectorScheduler))
        gc.freeze()
        side._loads._settings = replace(side._loads._settings, load="always")

    def bench_tier(self) -> dict[str, Any]:
        """Counters of kvpool's tier in this process, and `storing`, the chunks that it stores now."""
        from kvpool.connectors.vllm.tier import KvPoolTier

        tier: Any = getattr(self, "_bench_pool_tier", None)
        if tier is None:
            gc.unfreeze()  # vLLM hides from the collector what its start has made
            (tier,) = (one for one in gc.get_objects() if isinstance(one, KvPoolTier))
            gc.freeze()
            self._bench_pool_tier = tier
            self._bench_load_seconds: list[float] = []
            note_loads(tier._jobs, self._bench_load_seconds)
        return {
            **asdict(tier._pages.counts),
            "known_store_chunks": tier._jobs.known_chunks,
            "refused_store_chunks": tier._jobs.refused_chunks,
            "late_lookups": tier._lookups.late_count,
            "storing": tier._jobs.storing_bytes // tier._chunk_bytes,
            "load_seconds": [round(one, 4) for one in self._bench_load_seconds],
        }

    def bench_kill(self, pid: int, what: str, skip: int, delay_s: float) -> None:
        """Kill a process so long after the next order of a load or store, or one that comes after `skip` others.

        `bench_traced` says when; needs `bench_trace`.
        """
        self._bench_calls.aim = Aim(pid, what, skip, delay_s)

    def bench_pid(self) -> int:
        """This process: with one GPU an engine's core and worker."""
        return os.getpid()

    def bench_traced(self) -> list[tuple[float, str, str, float]]:
        """(time, method, request, what it said) since the last time."""
        return self._bench_calls.take()


def note_loads(jobs: TierJobs, seconds: list[float]) -> None:
    """Append how long each load of a tier has taken, from the order until vLLM is told of its end."""
    ended = jobs.ended

    def noted() -> list[EndedJob]:
        found = ended()
        seconds.extend(one.seconds for one in found if one.is_load)
        return found

    jobs.ended = noted  # type: ignore[method-assign]


class BlockWatch:
    """Sums of KV blocks by the tokens up to their end.

    A block's tokens may be computed more than once, in batches of other sizes and so with other last bits: each sum is
    kept, and a block that was loaded must have one of them. Runs on the engine's stream before a step: behind what
    computed the blocks, in front of what reads them.
    """

    def __init__(self, runner: Any, block_tokens: int, known: Path | None) -> None:
        """known: see `learn`."""
        self._runner, self._block_tokens = runner, block_tokens
        self._sums: dict[str, set[int]] = {}
        if known is not None:
            self.learn(known)
        self._requests: dict[str, _Request] = {}
        self._weights: torch.Tensor | None = None
        self.counts = {"computed": 0, "equal": 0, "unequal": 0, "unknown": 0, "zeroed": 0}
        self.zero = False

    def learn(self, known: Path) -> None:
        """Take in a file that a watch has saved, or a directory of some; there may be none yet."""
        for path in sorted(known.glob("*.json")) if known.is_dir() else [known]:
            if path.is_file():
                for name, sums in json.loads(path.read_text()).items():
                    self._sums.setdefault(name, set()).update(sums)

    def save(self, path: Path) -> None:
        """For another engine's watch."""
        path.write_text(json.dumps({name: sorted(sums) for name, sums in self._sums.items()}))

    def handle_preemptions(self, output: Any) -> None:
        """Take in what the last steps computed, and what this one's new requests did not have to."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        cached = output.scheduled_cached_reqs
        for number, request_id in enumerate(cached.req_ids):
            request = self._requests.get(request_id)
            if request is None:
                continue
            new = cached.new_block_ids[number]
            if request_id in cached.resumed_req_ids:  # preempted: its blocks are others
                request.block_ids, request.seen_blocks = list(new[0]), 0
            elif new is not None:
                request.block_ids += new[0]
            self._take_in(request, cached.num_computed_tokens[number])
        for data in output.scheduled_new_reqs:
            tokens = data.prompt_token_ids
            if tokens is None:
                continue
            request = _Request(tokens, list(data.block_ids[0]), self._block_tokens)
            self._requests[data.req_id] = request
            self._compare(request, data.num_computed_tokens)

    def _take_in(self, request: _Request, computed_tokens: int) -> None:
        end = min(computed_tokens, len(request.tokens)) // self._block_tokens
        if end <= request.seen_blocks:
            return
        for name, block_sum in zip(*self._sums_of(request, end), strict=True):
            self._sums.setdefault(name, set()).add(block_sum)
            self.counts["computed"] += 1
        request.seen_blocks = end

    def _compare(self, request: _Request, held_tokens: int) -> None:
        end = held_tokens // self._block_tokens
        if not end:
            return
        if self.zero:
            ids = torch.tensor(request.block_ids[:end], device=self._caches[0].device)
            for cache in self._caches:
                cache.index_fill_(0, ids, 0)
            self.counts["zeroed"] += end
        else:
            for name, block_sum in zip(*self._sums_of(request, end), strict=True):
                known = self._sums.get(name)
                verdict = "unknown" if known is None else "equal" if block_sum in known else "unequal"
                self.counts[verdict] += 1
        request.seen_blocks = end

    def _sums_of(self, request: _Request, end: int) -> tuple[list[str], list[int]]:
        names = request.names(end)[request.seen_blocks :]
        return names, self._summed(request.block_ids[request.seen_blocks : end])

    @property
    def _caches(self) -> Sequence[torch.Tensor]:
        caches: Sequence[torch.Tensor] = self._runner.kv_caches
        return caches

    def _summed(self, block_ids: Sequence[int]) -> list[int]:
        """A sum over all layers of each block, weighted by place, modulo 2**64; the same for every layout."""
        caches = self._caches
        device = caches[0].device
        ids = torch.tensor(block_ids, device=device)
        total = torch.zeros(len(block_ids), dtype=torch.int64, device=device)
        for cache in caches:
            words = cache.index_select(0, ids).contiguous().view(len(block_ids), -1).view(torch.int64)
            if self._weights is None:
                weights = torch.randint(1 << 62, (words.shape[1],), generator=torch.Generator().manual_seed(7))
                self._weights = (weights * 2 + 1).to(device)
            total = total * 0x5851F42D4C957F2D + (words * self._weights).sum(1)
        sums: list[int] = total.tolist()
        return sums


class HeadWatch(BlockWatch):
    """The same for each layer and head: the sums of a block go by their numbers in the model, whatever rank has them.

    Caches are [blocks, heads, tokens of a block, K and V].
    """

    def __init__(
        self, runner: Any, block_tokens: int, known: Path | None, *, first_layer: int, first_head: int
    ) -> None:
        super().__init__(runner, block_tokens, known)
        self._first_layer, self._first_head = first_layer, first_head

    def _sums_of(self, request: _Request, end: int) -> tuple[list[str], list[int]]:
        blocks = request.names(end)[request.seen_blocks :]
        names: list[str] = []
        sums: list[int] = []
        for layer, cache in enumerate(self._caches, self._first_layer):
            ids = torch.tensor(request.block_ids[request.seen_blocks : end], device=cache.device)
            words = cache.index_select(0, ids).contiguous()
            words = words.view(len(blocks), cache.shape[1], -1).view(torch.int64)
            if self._weights is None:
                weights = torch.randint(1 << 62, (words.shape[2],), generator=torch.Generator().manual_seed(7))
                self._weights = (weights * 2 + 1).to(cache.device)
            sums += (words * self._weights).sum(2).reshape(-1).tolist()
            names += [f"{name} {layer} {self._first_head + head}" for name in blocks for head in range(cache.shape[1])]
        return names, sums


class _Request:
    def __init__(self, tokens: Sequence[int], block_ids: list[int], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.tokens, self.block_ids, self.seen_blocks = list(tokens), block_ids, 0
        self._names: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16)

    def names(self, count: int) -> list[str]:
        """Of the first blocks: hashes of all tokens up to their ends."""
        while len(self._names) < count:
            first = len(self._names) * self._block_tokens
            self._hash.update(repr(self.tokens[first : first + self._block_tokens]).encode())
            self._names.append(self._hash.hexdigest())
        return self._names[:count]


@dataclass(frozen=True, slots=True)
class Aim:
    """A process to be killed; see BenchWorker.bench_kill."""

    pid: int
    what: str
    skip: int
    delay_s: float


class CallTrace:
    """When vLLM called the methods of a connector's class, on the clock of time.perf_counter, which processes share.

    Where kvpool's scheduler and worker share a process, the one asks the other itself which loads have come in.

    A step's end on the GPU is waited for by a thread of its own, as the engine does not wait for it.
    """

    _METHODS = ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta")
    _WORKER_METHODS = ("start_load_kv", "wait_for_save", "get_finished", "build_connector_worker_meta")

    def __init__(self, connector: type, worker: type) -> None:
        """worker: the class of what the connector's worker side is; of others than kvpool's there is nothing to see."""
        self._calls: list[tuple[float, str, str, float]] = []
        self._events: queue.SimpleQueue[tuple[torch.cuda.Event, str]] = queue.SimpleQueue()
        self.aim: Aim | None = None
        self._kill: threading.Timer | None = None
        for name in (*self._METHODS, *self._WORKER_METHODS):
            self._wrap(connector, name)
        if hasattr(worker, "take_arrived"):
            self._wrap(worker, "take_arrived")
        for name in ("match", "start_load"):  # on kvpool's event loop
            self._wrap_call(name)
        if torch.cuda.is_available():
            threading.Thread(target=self._await_steps, daemon=True).start()

    def take(self) -> list[tuple[float, str, str, float]]:
        """All since the last time; a kill that is due soon is waited for, one whose order did not come is dropped."""
        self.aim = None
        if self._kill is not None:
            self._kill.join()
            self._kill = None
        taken, self._calls = self._calls, []
        return sorted(taken)

    def _wrap(self, connector: type, name: str) -> None:
        method = getattr(connector, name)

        @functools.wraps(method)
        def call(instance: Any, *arguments: Any, **more: Any) -> Any:
            began_s = time.perf_counter()
            answer = method(instance, *arguments, **more)
            self._note(name, began_s, instance, arguments, answer)
            return answer

        setattr(connector, name, call)

    def _wrap_call(self, name: str) -> None:
        from kvpool.client.pool import AsyncPool

        method = getattr(AsyncPool, name)

        @functools.wraps(method)
        async def call(*arguments: Any, **more: Any) -> Any:
            self._calls.append((time.perf_counter(), f"{name} begun", "", 0.0))
            answer = await method(*arguments, **more)
            self._calls.append((time.perf_counter(), f"{name} answered", "", 0.0))
            return answer

        setattr(AsyncPool, name, call)

    def _note(self, name: str, began_s: float, instance: Any, arguments: tuple[Any, ...], answer: Any) -> None:
        now_s = time.perf_counter()
        if name in ("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"):
            said = (
                float(answer[0] or 0)
                if isinstance(answer, tuple)
                else float(arguments[-1])
                if len(arguments) == 3
                else 0.0
            )
            self._calls.append((began_s, f"{name} begun", arguments[0].request_id, 0.0))
            self._calls.append((now_s, name, arguments[0].request_id, said))
        elif name == "get_finished":
            for request_id in (answer[1] or ()) if answer else ():
                self._calls.append((now_s, "received", request_id, 0.0))
        elif name == "take_arrived":
            for end in answer:
                self._calls.append((now_s, "received", end.request_id, 0.0))
                self._calls.append((now_s, "load ended", end.request_id, end.duration_s * 1e3))
        elif name == "build_connector_worker_meta":
            for end in getattr(answer, "reports", ()):
                stored = hasattr(end, "stored_chunks")
                what = str(getattr(end, "number", "") if stored else end.request_id)
                self._calls.append((now_s, "store ended" if stored else "load ended", what, end.duration_s * 1e3))
        else:
            jobs = getattr(getattr(instance, "_connector_metadata", None), "jobs", None)
            if jobs is None:
                return
            if name == "start_load_kv":
                for load in jobs.loads:
                    self._calls.append((began_s, "load asked", load.request_id, 0.0))
                    self._calls.append((now_s, "load ordered", load.request_id, 0.0))
                    self._ordered("load")
            elif name == "wait_for_save" and jobs.stores:
                for store in jobs.stores:
                    self._calls.append((now_s, "store ordered", str(store.number), store.end_chunk - store.first_chunk))
                    if torch.cuda.is_available():
                        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        event.record()
                        self._events.put((event, str(store.number)))
                    self._ordered("store")

    def _ordered(self, what: str) -> None:
        aim = self.aim
        if aim is None or aim.what != what:
            return
        if aim.skip:
            self.aim = replace(aim, skip=aim.skip - 1)
            return
        self.aim = None
        self._kill = threading.Timer(aim.delay_s, self._kill_now, (aim.pid,))
        self._kill.start()

    def _kill_now(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self._calls.append((time.perf_counter(), "killed", str(pid), 0.0))

    def _await_steps(self) -> None:
        while True:
            event, number = self._events.get()
            event.synchronize()
            self._calls.append((time.perf_counter(), "step ended", number, 0.0))


def store_burst(side: Any, requests: int, tokens: int, block_tokens: int, block_count: int) -> dict[str, float]:
    """side: a ConnectorWorker that has nothing else to report. raises: ValueError, TimeoutError."""
    from kvpool.connectors.vllm.step_jobs import StepJobs, StoreJob, block_id_array
    from kvpool.core.chunks import HASH_BYTES

    chunk_tokens = side._settings.chunk_tokens
    chunks = tokens // chunk_tokens
    blocks_each = chunks * chunk_tokens // block_tokens
    if requests * blocks_each >= block_count:  # the first block is vLLM's own
        raise ValueError(f"{requests} x {tokens} tokens are more than the {block_count} blocks of the cache hold")
    blocks = (torch.randperm(block_count - 1)[: requests * blocks_each] + 1).view(requests, blocks_each).tolist()
    orders = [
        StoreJob(
            number=-1 - number,  # the scheduler has none of them
            request_id=f"bench-{number}",
            hashes=os.urandom(chunks * HASH_BYTES),
            token_count=tokens,
            block_ids=block_id_array(blocks[number]),
            first_chunk=0,
            end_chunk=chunks,
        )
        for number in range(requests)
    ]
    ends: list[Any] = []
    began_s = time.perf_counter()
    side.start_stores(StepJobs(step=0, stores=orders))
    while len(ends) < requests:
        time.sleep(_POLL_S)
        ends += side.take_reports()
        if time.perf_counter() - began_s > _STORE_TIMEOUT_S:
            raise TimeoutError(f"{len(ends)} of {requests} stores have ended after {_STORE_TIMEOUT_S:g} s")
    return {
        "seconds": time.perf_counter() - began_s,
        "bytes": float(sum(end.size_bytes for end in ends)),
        "chunks": float(sum(end.stored_chunks for end in ends)),
        "failed_chunks": float(sum(end.failed_chunks + end.skipped_chunks for end in ends)),
    }


def _copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
    targets, sources = (memory.view(4, _COPY_BYTES) for memory in (target, source))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    best = 0.0
    with torch.cuda.stream(stream):
        for _ in range(3):
            stream.synchronize()
            started_s = time.perf_counter()
            for number in range(_COPIES):
                targets[number % 4].copy_(sources[number % 4], non_blocking=True)
            stream.synchronize()
            best = max(best, _COPIES * _COPY_BYTES / (time.perf_counter() - started_s) / 1e9)
    return best
