"""Entry point of the `kvpool` command. Says what to install where the extra `cli` is missing."""

from __future__ import annotations

import importlib.util
import json
import platform
import sys

from kvpool_cli.errors import EXIT_USAGE

SUPPORTED_MACHINES = ("x86_64", "aarch64")
_NEEDED = ("typer", "rich", "redis", "prometheus_client")  # the extra `cli`


def main() -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 not understood, not confirmed or could not start."""
    if sys.platform != "linux" or platform.machine() not in SUPPORTED_MACHINES:
        here = f"{sys.platform} {platform.machine()}"
        return _refuse(f"runs on Linux x86_64 and aarch64, and this is {here}; use a Linux machine or container")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return _refuse(
            f"packages of kvpool's extra `cli` are missing here ({', '.join(missing)}): "
            "pip install '/path/to/checkout[cli]', or the path of a wheel instead"
        )
    from kvpool_cli.main import run_command

    return run_command(sys.argv[1:])


def _refuse(text: str) -> int:
    """As kvpool_cli.output.fail, which needs the extra."""
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps({"version": 1, "error": text, "exit_code": EXIT_USAGE}, indent=2) + "\n")
    else:
        sys.stderr.write(f"kvpool: {text}\n")
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
