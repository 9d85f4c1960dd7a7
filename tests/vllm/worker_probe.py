"""What tests look at in a worker of vLLM, which mixes it into its own class (`worker_extension_cls`)."""

from __future__ import annotations

import hashlib
from typing import Any


class WorkerProbe:
    """Methods are called by name, with plain values; vLLM refuses names that its worker has."""

    model_runner: Any  # the worker's

    def watch_jobs(self) -> None:
        """Note from now on which loads and stores the connector gets."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        bind = connector.bind_connector_metadata
        self._jobs: list[tuple[str, list[int]]] = []

        def bind_and_note(metadata: Any) -> None:
            self._jobs += [("store", job.block_ids.tolist()) for job in metadata.jobs.stores]
            self._jobs += [("load", job.block_ids.tolist()) for job in metadata.jobs.loads]
            bind(metadata)

        connector.bind_connector_metadata = bind_and_note

    def watch_drafts(self) -> None:
        """Note from now on what the drafter proposes."""
        runner = self.model_runner
        drafter = runner.drafter if hasattr(runner, "drafter") else runner.speculator  # model runner V2's name
        propose = drafter.propose
        self._drafts: list[list[list[int]]] = []

        def propose_and_note(*arguments: Any, **more: Any) -> Any:
            drafts = propose(*arguments, **more)
            self._drafts.append(drafts.tolist())
            return drafts

        drafter.propose = propose_and_note

    def take_drafts(self) -> list[list[list[int]]]:
        """Return what the drafter has proposed since the last call: for each step and request, tokens."""
        drafts, self._drafts = self._drafts, []
        return drafts

    def spoil_loads(self, group: int, how: str, layers: tuple[int, ...] = ()) -> None:
        """From now on the blocks that loads fill of one KV cache group hold no KV ("zeroes"), that of other tokens of
        the prompt ("others"), or what they held when they were loaded last ("kept": "keep" changes nothing), once a
        load has ended. group: -1 spoils none. layers: numbers of those to spoil, from the end if negative; all without.
        """
        from kvpool.connectors.vllm.worker import ConnectorWorker

        if not hasattr(self, "_spoiled"):
            self._loading: dict[str, list[Any]] = {}  # jobs of requests whose loads have not ended
            self._watch_loads(ConnectorWorker)
        self._spoiled, self._spoiled_layers = (group, how), tuple(layers)

    def _watch_loads(self, kind: Any) -> None:
        """Spoil what this process's connector has loaded before vLLM learns that the loads have ended."""
        start, received, arrived = kind.start_loads, kind.take_finished_recving, kind.take_arrived

        def start_loads(side: Any, jobs: Any) -> None:
            for job in jobs.loads:
                self._loading.setdefault(job.request_id, []).append(job)
            start(side, jobs)

        def take_finished_recving(side: Any) -> set[str]:
            requests: set[str] = received(side)
            self._spoil(requests)
            return requests

        def take_arrived(side: Any) -> Any:
            reports = arrived(side)
            self._spoil({report.request_id for report in reports})
            return reports

        kind.start_loads, kind.take_finished_recving = start_loads, take_finished_recving
        kind.take_arrived = take_arrived

    def _spoil(self, requests: set[str]) -> None:
        import numpy as np

        from kvpool.connectors.vllm import wiring as own

        group, how = self._spoiled
        configs = self.model_runner.vllm_config, self.model_runner.kv_cache_config
        wiring: Any = own  # which has what tests put in place of its functions
        infos, chunk_tokens = wiring.kv_cache_infos(*configs), wiring.settings_from_config(*configs).chunk_tokens
        number = next((at for at, info in enumerate(infos) if group in info.members), -1)
        jobs = [job for request_id in requests for job in self._loading.pop(request_id, ()) if job.group == number]
        for request_id in dict.fromkeys(job.request_id for job in jobs):
            info = infos[number]
            found = []
            for job in [job for job in jobs if job.request_id == request_id]:
                # Of the pages of its chunks those of this group.
                tokens = np.arange(job.first_token, job.end_token)
                of_group = tokens // chunk_tokens % len(info.members) == info.members.index(group)
                found.append(job.block_ids[np.unique(tokens[of_group] // info.block_tokens)])
            blocks = np.concatenate(found)
            # Of other groups too: they have other blocks of it. Views of recurrent state say nothing of their page.
            tensors = [tensor for tensor in self.model_runner.kv_caches if not isinstance(tensor, tuple)]
            if how == "keep":
                self._kept = [tensor[blocks].clone() for tensor in tensors]
            chosen = {number % len(tensors) for number in self._spoiled_layers} or set(range(len(tensors)))
            for number, tensor in enumerate(tensors):
                if how == "keep" or number not in chosen:
                    continue
                if how == "kept":
                    tensor[blocks] = self._kept[number]
                else:
                    tensor[blocks] = 0 if how == "zeroes" else tensor[blocks[:1]].clone()

    def spoil_offload(self, how: str) -> None:
        """From now on vLLM's offload loads `zeroes`, or what was loaded last (`kept`); "": what it should. With CUDA
        the tier is in this process, and brings them: call this before it loads anything."""
        import torch

        if torch.cuda.is_available():
            _spoil_objects(how)
            return
        from tests.vllm.host_offload import HostWorker

        HostWorker.spoiled = how

    def block_count(self) -> int:
        """Of the KV cache, as vLLM made it."""
        return int(self.model_runner.kv_cache_config.num_blocks)

    def job_blocks(self) -> list[tuple[str, list[str]]]:
        """Return loads and stores since `watch_jobs`, with digests over all layers of their blocks as they are now."""
        return [(kind, [self._block_digest(block) for block in blocks]) for kind, blocks in self._jobs]

    def block_digest(self, block: int) -> str:
        """Of its bytes in all layers."""
        return self._block_digest(block)

    def _block_digest(self, block: int) -> str:
        import torch

        digest = hashlib.blake2b(digest_size=16)
        for tensor in self.model_runner.kv_caches:
            digest.update(tensor[block].contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return digest.hexdigest()


_spoiled = {"how": ""}
_kept = bytearray()  # an object that was read


def _spoil_objects(how: str) -> None:
    """Have all objects that are read from the cluster be zeroes, or the last one that was read before."""
    from kvpool.client.object_store import AsyncObjects

    _spoiled["how"] = how
    read = AsyncObjects.get

    async def get(objects: AsyncObjects, keys: Any, buffers: Any) -> list[bool]:
        came = await read(objects, keys, buffers)
        for buffer in buffers:
            with memoryview(buffer).cast("B") as view:
                if not _spoiled["how"]:
                    _kept[:] = view
                else:
                    view[:] = _kept if _spoiled["how"] == "kept" else bytes(view.nbytes)
        return came

    if read.__module__ != __name__:  # not yet
        AsyncObjects.get = get  # type: ignore[method-assign, assignment]
