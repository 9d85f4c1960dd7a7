"""The disk tier on real file systems that are small, full, failing or without direct transfers.

Each runs in a process of its own with a private mount that ends with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import fcntl, os, struct, sys
from pathlib import Path
from kvpool.core.errors import KvPoolError, StoreFault
from kvpool_pagestore.adapters.file_io import allows_direct
from tests.unit.pagestore.rocks_pages import get, opened, page, page_write, put, scanned
mount = Path(sys.argv[1])
def put_failing(store, *numbers):
    reported = []
    store.put_batch([page_write(number) for number in numbers], lambda _, failure: reported.append(failure))
    return {type(failure) for failure in reported}
def fill():
    descriptor = os.open(mount / "filler", os.O_CREAT | os.O_WRONLY)
    for size in (1 << 20, 4096, 1):
        try:
            while True:
                os.write(descriptor, bytes(size))
        except OSError:
            pass
    os.close(descriptor)
def probe_fails(store):
    try:
        store.probe()
    except StoreFault:
        return True
    return False
def refused(call):
    try:
        call()
    except StoreFault:
        return True
    return False
"""

FULL = """
store = opened(mount / "disk", capacity_bytes=60 << 20)
put(store, *range(50))
assert store.used_bytes() <= 60 << 20
fill()
names = 0
while not refused(lambda: store.save_value(f"name {names}", bytes(1000))):  # the room that the log has reserved
    names += 1
assert put_failing(store, 50, 51) == {StoreFault} and probe_fails(store)
assert all(get(store, number) == page(number) for number in range(50))
(mount / "filler").unlink()
store.probe()
put(store, *range(50, 60))
store.close()
store = opened(mount / "disk", capacity_bytes=60 << 20)
assert scanned(store) == set(range(60)) and all(get(store, number) == page(number) for number in range(60))
store.close()
"""

NO_ROOM_TO_GROW = """
store = opened(mount / "disk", capacity_bytes=60 << 20)
fill()
os.truncate(mount / "filler", os.stat(mount / "filler").st_size - (8 << 20))
assert put_failing(store, 1) == {StoreFault} and probe_fails(store)
assert not list((mount / "disk" / "extents").glob("*.pages"))
store.save_value("name", b"value")  # records have room
(mount / "filler").unlink()
store.probe()
put(store, *range(50))
store.close()
"""

FAILING = """
store = opened(mount / "disk", capacity_bytes=60 << 20)
put(store, *range(50))
descriptor = os.open(mount, os.O_RDONLY)
fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", 1))  # EXT4_IOC_SHUTDOWN: every transfer fails from now on
assert put_failing(store, 50) == {StoreFault} and probe_fails(store)
assert refused(lambda: get(store, 7)) and refused(lambda: store.save_value("x", b"y"))
os._exit(0)
"""

WITHOUT_DIRECT = """
store = opened(mount / "disk", capacity_bytes=60 << 20)
put(store, *range(50))
store.delete_batch([page_write(number).key for number in range(0, 50, 2)])
put(store, *range(50, 80))
store.close()
store = opened(mount / "disk", capacity_bytes=60 << 20)
kept = {*range(1, 50, 2), *range(50, 80)}
assert scanned(store) == kept and all(get(store, number) == page(number) for number in kept)
store.close()
"""

needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("mkfs.ext4") is None,
    reason="mounts need root, unshare and mkfs.ext4",
)


def run(tmp_path: Path, make: str, script: str) -> None:
    """Run a script below a fresh mount; skip where the system allows none."""
    point = tmp_path / "mount"
    point.mkdir()
    command = ["unshare", "--mount", "sh", "-c", f'{make} || exit 77; exec "$@"', "sh"]
    inner = [sys.executable, "-c", PRELUDE + script, str(point)]
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": os.environ["PATH"]}
    done = subprocess.run([*command, *inner], env=environment, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip(f"no mount: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def ext4(tmp_path: Path) -> str:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(96 << 20)
    return f"mkfs.ext4 -q -F -m 0 {image} && mount -o loop {image} {tmp_path / 'mount'}"


def tmpfs(tmp_path: Path) -> str:
    return f"mount -t tmpfs -o size=70m none {tmp_path / 'mount'}"


@needs_mounts
@pytest.mark.parametrize("script", [FULL, NO_ROOM_TO_GROW, FAILING], ids=["full", "no room to grow", "failing"])
@pytest.mark.slow
def test_a_small_ext4(tmp_path: Path, script: str) -> None:
    run(tmp_path, ext4(tmp_path), script)


@needs_mounts
@pytest.mark.parametrize("script", [FULL, WITHOUT_DIRECT], ids=["full", "in order"])
def test_a_small_tmpfs(tmp_path: Path, script: str) -> None:
    run(tmp_path, tmpfs(tmp_path), script)
