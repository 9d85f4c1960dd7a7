"""Which weights an engine loaded, by their files: the same for all engines that loaded a copy of them."""

from __future__ import annotations

from pathlib import Path

from kvpool.client.checkpoint import CONFIG_FILE, weights_digest


def checkpoint_place(name: str, commit: str | None = None) -> Path | None:
    """Where the files of a model lie: a directory or file of that name, or the hub's cache. Nothing is downloaded."""
    place = Path(name)
    if name and place.exists():
        return place
    try:
        from transformers.utils.hub import cached_file

        found = cached_file(name, CONFIG_FILE, revision=commit, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return None
    return Path(found).parent if found else None


def weights_revision(name: str, commit: str | None = None) -> str | None:
    """A digest of the weights' content, else the hub's commit; None if neither is known.

    Engines that know only the commit share with each other, not with those that have the files. raises: OSError.
    """
    place = checkpoint_place(name, commit)
    digest = weights_digest(place) if place is not None else None
    return digest or commit
