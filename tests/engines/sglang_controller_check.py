"""Runs in SGLang's own environment: the launcher's arguments, and HiCache's controller with its storage threads.

    python tests/engines/sglang_controller_check.py '{"settings": {...}, "pagestore_pid": 1, "quickstart": "...",
      "directory": "..."}'

Real: the argument parser, the published configuration, device pool, allocator, host pool group, controller and its
prefetch, backup and synchronization threads. Left out: `cudaHostRegister`, which only a CUDA build has, and the copies
between device and host, which are CUDA kernels; the host pool is filled by hand. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

# SGLang imports torchvision for multimodal models; its CUDA build finds no operators beside a torch for the CPU.
_operators: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_kv_only_group  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.mem_cache.pool_host import common  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402
from sglang.srt.server_args import prepare_server_args  # noqa: E402

LAYERS, HEADS, HEAD_DIM, TOKENS = 4, 8, 64, 64 * 130  # more pages than one batch of a storage thread
WAIT_S = 30.0
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 1024,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": 1000,
    "max_position_embeddings": TOKENS,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def quickstart_arguments(text: str, directory: Path, settings: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The launcher's command line and its JSON, as they stand in the quick start; only the cluster is another one."""
    found = re.search(r"cat > kvpool\.json <<'JSON'\n(.*?)\n\s*JSON\n", text, re.DOTALL)
    command = re.search(r"python -m sglang\.launch_server (.*?)\n\n", text, re.DOTALL)
    assert found and command, "the quick start has another form"
    given: dict[str, Any] = json.loads(found[1])
    assert set(settings) >= {"index_endpoints", "pagestore", "host_id"} <= set(given)
    (directory / "kvpool.json").write_text(json.dumps(given | settings))
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text(json.dumps(MODEL))
    words = shlex.split(command[1].replace("\\\n", " "))
    places = {"MODEL": str(directory / "model"), "@kvpool.json": f"@{directory / 'kvpool.json'}"}
    return [places.get(word, word) for word in words], given


def controller_of(arguments: Any, parsed: tuple[Any, ...]) -> HybridCacheController:
    """As UnifiedRadixCache makes one for a model without side pools."""
    common._cuda_host_register = lambda *_, **__: None  # noqa: SLF001  # SGLang's: it needs CUDA
    page = arguments.page_size
    device_pool = MHATokenToKVPool(
        size=TOKENS * 2,
        page_size=page,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    mapping = {layer: layer for layer in range(LAYERS)}
    group = build_kv_only_group(page_size=page, kv_pool=device_pool, full_layer_mapping=mapping, use_mla=False)
    extra_config, threshold, *_ = parsed
    return HybridCacheController(
        PagedTokenToKVPoolAllocator(TOKENS * 2, page, torch.bfloat16, "cpu", device_pool, False),
        group,
        page,
        None,
        threading.Event(),
        write_policy=arguments.hicache_write_policy,
        io_backend=arguments.hicache_io_backend,
        storage_backend=arguments.hicache_storage_backend,
        prefetch_threshold=threshold,
        model_name="meta/tiny",
        storage_backend_extra_config=dict(extra_config),
        enable_storage_metrics=True,
    )


def backed_up(controller: HybridCacheController, slots: torch.Tensor, tokens: list[int]) -> Any:
    """What the tree does when a node has been written to the host: the backup thread stores it."""
    hashes = get_storage_hash_str(tokens, None, page_size=controller.page_size)
    controller.write_storage(slots, tokens, hash_value=hashes, prefix_keys=[])
    return controller.ack_backup_queue.get(timeout=WAIT_S)


def prefetched(controller: HybridCacheController, tokens: list[int]) -> tuple[Any, int]:
    """What the tree does with a request: query, host buffers, transfer. (operation, tokens loaded)."""
    operation = controller.prefetch(CacheRequestHandle("request", 0), tokens, None, [])
    hit = controller.prefetch_hit_queue.get(timeout=WAIT_S)
    assert hit is operation
    if not hit.storage_hit_count:
        return hit, 0
    hit.host_indices = controller.alloc_prefetch_host_buffers(hit, hit.storage_hit_count)
    controller.prefetch_buffer.put(hit)
    loaded = 0
    while True:
        ack = controller.ack_prefetch_queue.get(timeout=WAIT_S)
        loaded = max(loaded, ack.completed_tokens or 0)
        if ack.completed_req:
            return hit, loaded


def all_prefetched(controller: HybridCacheController, tokens: list[int]) -> Any:
    """What was stored is announced soon."""
    ends_s = time.monotonic() + WAIT_S
    while True:
        operation, loaded = prefetched(controller, tokens)
        if loaded == len(tokens):
            return operation
        assert time.monotonic() < ends_s, f"only {loaded} of {len(tokens)} tokens are loaded"
        if operation.host_indices is not None:
            controller.mem_pool_host.free(operation.host_indices)


def check_round_trip(arguments: Any, parsed: tuple[Any, ...]) -> HybridCacheController:
    """Stored by one controller, loaded by the next, as after a restart of SGLang."""
    tokens = list(range(TOKENS))
    first = controller_of(arguments, parsed)
    buffer = first.storage_host_pool.kv_buffer
    generator = torch.Generator().manual_seed(1)
    flat = buffer.view(torch.uint8).view(-1)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))
    slots = first.mem_pool_host.alloc(TOKENS)
    assert backed_up(first, slots, tokens).completed_tokens == TOKENS
    assert first.storage_backend.get_stats().backup_pgs
    second = controller_of(arguments, parsed)
    assert prefetched(second, [7, *tokens[1:]])[1] == 0, "another prompt"
    second.mem_pool_host.alloc(arguments.page_size)  # so that pages lie elsewhere
    loaded = all_prefetched(second, tokens)
    ours = second.storage_host_pool.kv_buffer
    assert arguments.hicache_mem_layout == "page_first"
    assert torch.equal(ours[:, loaded.host_indices].view(torch.uint8), buffer[:, slots].view(torch.uint8))
    second.reset()  # what a flush of the cache does: its threads must end within 10 s
    second.mem_pool_host.clear()
    assert prefetched(second, tokens)[1] == TOKENS
    first.detach_storage_backend()
    assert first.storage_backend is None
    return second


def main() -> None:
    given = json.loads(sys.argv[1])
    directory = Path(given["directory"])
    words, described = quickstart_arguments(Path(given["quickstart"]).read_text(), directory, given["settings"])
    arguments = prepare_server_args([*words, "--device", "cpu"])
    runtime_context.publish(arguments, role="scheduler", ranks=runtime_context.SpawnRanks(world_rank=0, gpu_id=0))
    parsed = HybridCacheController.parse_storage_backend_extra_config(arguments.hicache_storage_backend_extra_config)
    assert arguments.enable_hierarchical_cache and arguments.hicache_storage_backend == "dynamic"
    assert parsed[-1] is described["hicache_storage_pass_prefix_keys"] is described["chained"] is True
    controller = check_round_trip(arguments, parsed)
    os.kill(given["pagestore_pid"], signal.SIGKILL)
    tokens = list(range(TOKENS))
    assert prefetched(controller, tokens)[1] == 0
    slots = controller.mem_pool_host.alloc(arguments.page_size)
    assert backed_up(controller, slots, tokens[: arguments.page_size]).completed_tokens == 0
    controller.detach_storage_backend()
    print(json.dumps({"sglang": version("sglang"), "torch": torch.__version__, "checked": True}))


if __name__ == "__main__":
    main()
