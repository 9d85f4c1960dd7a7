"""The secret from which a tenant's chunk-hash keys derive."""

from typing import Final

from blake3 import blake3

SECRET_BYTES: Final = 32


def secret_from_file_content(content: bytes) -> bytes:
    """The 32-byte secret that a file stands for: its bytes if there are just 32, else their hash.

    Raises ValueError for fewer, so that an empty or cut-off file is not taken for a secret.
    """
    if len(content) < SECRET_BYTES:
        raise ValueError(f"it has {len(content)} bytes, at least {SECRET_BYTES} are needed")
    return content if len(content) == SECRET_BYTES else blake3(content).digest()
