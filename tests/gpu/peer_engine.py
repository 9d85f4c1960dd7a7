"""An engine rank on a GPU as its own process: `python -m tests.gpu.peer_engine JSON`. One command a line, one answer.

{"op": "pull", "pulls": [TokenPull's fields, session ids in hex]}   answers {"size_bytes", "copy_s"} or {"error"}
{"op": "digest"}                                                    answers {"digest"}: of all its cache memory
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.client.config import ClientConfig
from kvpool.client.engine_registration import EngineRegistration
from kvpool.client.gpuagent import EngineSession
from kvpool.client.gpuagent_control import AgentControl
from kvpool.client.peer_pulls import PeerPulls, TokenPull
from kvpool.core.elements import Codec, Dtype
from kvpool.core.errors import KvPoolError
from kvpool.core.geometry import KvGroup
from kvpool.core.keyspace import KeyspaceSpec
from kvpool.core.layout import EngineLayout
from tests.fixtures import layout_presets

CLIENT = ClientConfig(connect_timeout_s=60.0, call_timeout_s=60.0)


def spec_of(options: dict[str, Any]) -> KeyspaceSpec:
    """Of a rank's options."""
    return KeyspaceSpec(
        model_id="m",
        model_revision="r",
        groups=(KvGroup(*options["geometry"]),),
        dtype=Dtype.BF16,
        codec=Codec[options["codec"]],
        chunk_tokens=256,
    )


def layout_of(options: dict[str, Any]) -> EngineLayout:
    """Over one tensor of bytes for each handle."""
    preset = getattr(layout_presets, f"{options['layout']}_layout")
    spec, heads = spec_of(options), range(*options["heads"])
    layout: EngineLayout = preset(
        spec, range(spec.group.layers), heads, options["block_tokens"], options["block_count"]
    )
    return layout


def first_bytes(options: dict[str, Any]) -> list[npt.NDArray[np.uint8]]:
    """What its memory holds at first, by handle."""
    random = np.random.default_rng(options["seed"])
    return [random.integers(0, 256, size, dtype=np.uint8) for size in layout_of(options).handle_sizes]


def digest(memory: list[npt.NDArray[np.uint8]]) -> str:
    """Of all bytes, by handle."""
    hasher = hashlib.sha256()
    for each in memory:
        hasher.update(each.tobytes())
    return hasher.hexdigest()


async def main(options: dict[str, Any]) -> None:
    """Serve commands until the input ends."""
    import torch

    from kvpool.client.gpu import export_tensors
    from kvpool_server.process import die_with_parent

    die_with_parent(options["parent_pid"])
    device = torch.device("cuda", options["device"])
    tensors = [torch.from_numpy(each).to(device) for each in first_bytes(options)]
    torch.cuda.synchronize(device)
    exported = export_tensors(tensors)
    plan = EngineRegistration(
        endpoint=options["agent"],
        engine_name=f"engine on {device}",
        keyspace_name="peer",
        spec=spec_of(options),
        layout=exported.layout(layout_of(options)),
        regions=exported.regions,
    )
    session = await EngineSession.open(plan, CLIENT)
    control = AgentControl(options["agent"], CLIENT)
    pulls = PeerPulls(session, control, CLIENT)
    print(json.dumps({"session": session.session_id.hex()}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        if command["op"] == "digest":
            answer: dict[str, Any] = {"digest": digest([tensor.cpu().numpy() for tensor in tensors])}
        else:
            wanted = [
                TokenPull(**(pull | {"source_session_id": bytes.fromhex(pull["source_session_id"])}))
                for pull in command["pulls"]
            ]
            handle = pulls.begin(wanted, wait_s=60.0)
            try:
                report = await handle.done(90.0)
                answer = {"size_bytes": report.size_bytes, "copy_s": report.copy_s}
            except KvPoolError as error:
                answer = {"error": error.reason}
            await asyncio.wait_for(handle.wait_hold(), 60.0)
        print(json.dumps(answer), flush=True)
    await control.close()
    await session.close()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
