"""The scripts that change what Redis holds. Each touches the keys of one slot.

Each runs in constant time, but split_group. All keys that a script touches are named by its caller.
"""

import hashlib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the name by which a server that has it runs it."""

    source: bytes
    sha: bytes  # 40 hex digits


def load_script(name: str) -> Script:
    """The script of the file `name`.lua."""
    source = resources.files(__name__).joinpath(f"{name}.lua").read_bytes()
    return Script(source, hashlib.sha1(source, usedforsecurity=False).hexdigest().encode())
