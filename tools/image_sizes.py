"""Sizes of built images beside their base: `python tools/image_sizes.py [IMAGE ...]`; exit code 1 for one too large.

Unpacked sizes, as Docker counts them; layers that images share are counted in each.
"""

import json
import subprocess
import sys

PREFIX, VERSION, BASE = "kvpool-", "0.1.0", "python:3.11-slim"
LIMITS_MB = {"index": 200, "pagestore": 200, "gpuagent": 200, "demo": 2000}


def docker(*arguments: str) -> str:
    """Output of a docker command. Raises CalledProcessError."""
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout


def layers(image: str) -> "list[str]":
    """Digests of its layers, the lowest first."""
    found: list[str] = json.loads(docker("image", "inspect", image))[0]["RootFS"]["Layers"]
    return found


def size_bytes(image: str) -> int:
    """Unpacked, its base included."""
    return int(json.loads(docker("image", "inspect", image))[0]["Size"])


def main() -> int:
    """Print the table."""
    wanted = sys.argv[1:] or [f"{PREFIX}{name}:{VERSION}" for name in LIMITS_MB]
    base_layers, base_bytes = layers(BASE), size_bytes(BASE)
    over = False
    print(f"{'image':<28} {'beside the base':>16} {'whole':>10}   (base {BASE}: {base_bytes / 1e6:.0f} MB)")
    for image in wanted:
        if layers(image)[: len(base_layers)] != base_layers:
            print(f"{image:<28} is not built on {BASE}")
            over = True
            continue
        whole_bytes = size_bytes(image)
        beside_mb = (whole_bytes - base_bytes) / 1e6
        limit_mb = LIMITS_MB.get(image.removeprefix(PREFIX).partition(":")[0])
        too_large = limit_mb is not None and beside_mb > limit_mb
        over |= too_large
        note = f"   over its {limit_mb} MB" if too_large else ""
        print(f"{image:<28} {beside_mb:>13.0f} MB {whole_bytes / 1e6:>7.0f} MB{note}")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
