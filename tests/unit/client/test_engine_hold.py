"""When blocks in GPU memory may be handed out again after the agent has gone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from kvpool.client.engine_hold import GpuMemoryHold, PeerProcess
from kvpool.core.ipc import HOLD_ENDED
from kvpool.testing import eventually
from tests.fixtures.patience import PATIENCE_S

# Listens, says so, and stays until it is killed.
LISTENER = (
    "import socket,sys;s=socket.socket(socket.AF_UNIX);s.bind(sys.argv[1]);s.listen();print('.',flush=True);input()"
)


def start_listener(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LISTENER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b".\n"
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


async def test_an_agent_that_says_so_has_let_go_at_once() -> None:
    hold = GpuMemoryHold(driver_grace_s=3600.0)
    descriptor = hold.lent[0].lent_descriptor()
    ending = asyncio.ensure_future(hold.ended())
    await asyncio.sleep(0)
    assert not ending.done()
    os.pwrite(descriptor, HOLD_ENDED, 0)
    await asyncio.sleep(0)
    assert not ending.done()  # it says so, and holds the file all the same
    os.close(descriptor)
    await asyncio.wait_for(ending, PATIENCE_S)
    hold.close()


async def test_a_lock_that_is_gone_without_a_word_waits_for_the_process(tmp_path: Path) -> None:
    process = start_listener(tmp_path / "s")
    hold = GpuMemoryHold(driver_grace_s=0.0)
    hold.agent_at(str(tmp_path / "s"))
    os.close(hold.lent[0].lent_descriptor())
    ending = asyncio.ensure_future(hold.ended())
    await asyncio.wait((ending,), timeout=0.05)
    assert not ending.done()
    end(process)
    await asyncio.wait_for(ending, PATIENCE_S)
    hold.close()


async def test_the_driver_gets_its_grace_after_the_process() -> None:
    hold = GpuMemoryHold(driver_grace_s=0.05)  # the agent's process is not visible from here
    os.close(hold.lent[0].lent_descriptor())
    started_s = asyncio.get_running_loop().time()
    await hold.ended()
    assert asyncio.get_running_loop().time() - started_s >= 0.05
    hold.close()


async def test_a_process_is_known_until_its_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert PeerProcess.behind(str(path)) is None
    process = start_listener(path)
    peer = PeerProcess.behind(str(path))
    assert peer is not None
    assert not peer.has_ended()
    process.kill()
    await eventually(peer.has_ended)  # also before anybody has waited for it
    process.communicate()
    peer.close()
    peer.close()
    assert not peer.has_ended()
