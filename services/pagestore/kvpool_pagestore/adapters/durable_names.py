"""Names in directories that survive a power loss: syncing a file does not sync the name it is found by."""

from __future__ import annotations

import os
from pathlib import Path


def make_directories(directory: Path) -> None:
    """Make a directory and those above it, durably. Raises OSError."""
    if not directory.is_dir():
        make_directories(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
