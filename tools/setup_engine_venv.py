"""Make the virtual environment in which an engine's own package is tried: .venv-<engine>, from tests/engines.

    python tools/setup_engine_venv.py sglang lmcache [--torch-index-url URL]

Engines do not share one environment. Quick when there is nothing to do: the stamp, written last, is the list itself.
"""

import argparse
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LISTS = REPOSITORY / "tests" / "engines"
STAMP_NAME = ".kvpool-setup"
ALONE = "# without dependencies"


def requirements(text: str) -> tuple[list[str], list[str]]:
    """(with dependencies, without) of a list: what follows the line ALONE comes without."""
    parts = text.split(ALONE)
    if len(parts) != 2:
        raise ValueError(f"the list must have one line {ALONE!r}")
    with_them, alone = (
        [line.strip() for line in part.splitlines() if line.strip() and not line.startswith("#")] for part in parts
    )
    return with_them, alone


def set_up(engine: str, torch_index_url: str) -> None:
    """Make or repair one environment."""
    wanted = (LISTS / f"{engine}.txt").read_text()
    venv = REPOSITORY / f".venv-{engine}"
    stamp = venv / STAMP_NAME
    if stamp.exists() and stamp.read_text() == wanted:
        return
    with_them, alone = requirements(wanted)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    torch = next(line for line in with_them if line.startswith("torch=="))
    if torch_index_url:
        subprocess.run([*pip, "--no-deps", "--index-url", torch_index_url, torch], check=True)
    subprocess.run([*pip, *with_them], check=True)
    subprocess.run([*pip, "--no-deps", *alone], check=True)
    stamp.write_text(wanted)


def main() -> int:
    """Exit code 1 if an environment could not be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", choices=sorted(path.stem for path in LISTS.glob("*.txt")))
    parser.add_argument("--torch-index-url", default="", help="package index that torch alone is taken from")
    arguments = parser.parse_args()
    try:
        for engine in arguments.engines:
            set_up(engine, arguments.torch_index_url)
    except subprocess.CalledProcessError as error:
        print(f"setup of an engine's environment failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
