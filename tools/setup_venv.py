"""Make or repair the virtual environment that all make targets share; quick when there is nothing to do.

The stamp, written last, says what the environment was made from. Where it is missing or differs (a set-up that was cut
short, a changed pin, another Python, a moved checkout) the environment is completed, or made again if it is unusable.
Run by whatever Python is at hand, so: standard library only, and nothing newer than Python 3.6 before the refusal.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
MACHINES = ("x86_64", "aarch64")
STAMP_NAME = ".kvpool-setup"
CONSTRAINTS = REPOSITORY / "constraints.txt"
# What decides the content of the environment.
INPUTS = (REPOSITORY / "pyproject.toml", CONSTRAINTS, Path(__file__).resolve())

# Run by the environment's own Python: exits 0 if every file that a distribution brought is there in its full size.
WHOLENESS_CHECK = """
import sys
from importlib.metadata import distributions
def is_whole(file):
    path = file.locate()
    return file.suffix == ".pyc" or path.exists() and file.size in (None, path.stat().st_size)
sys.exit(not all(dist.files is not None and all(map(is_whole, dist.files)) for dist in distributions()))
"""


class SetupError(Exception):
    """Set-up cannot go on; the message is the one line for the person who asked."""


def refuse_unsupported(system: str, machine: str, version: "tuple[int, int]") -> None:
    """Raise SetupError unless this is a Python and a machine on which kvpool runs."""
    if system != "Linux" or machine not in MACHINES:
        raise SetupError(f"kvpool runs on Linux x86_64 and aarch64, not on {system} {machine}")
    if not OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        raise SetupError(
            f"kvpool needs Python 3.11, 3.12 or 3.13, this is {version[0]}.{version[1]}: name another, as in "
            "`make setup PYTHON=python3.12`"
        )


def fingerprint(venv: Path, torch_index_url: str) -> str:
    """Hex digest of everything that the content of the environment depends on."""
    digest = hashlib.sha256()
    for text in (str(REPOSITORY), str(venv), platform.python_version(), torch_index_url):
        digest.update(text.encode() + b"\0")
    for path in INPUTS:
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_usable(venv: Path) -> bool:
    """Whether the environment has this Python's version, has pip, and was made at this very path."""
    try:
        made_by = (venv / "pyvenv.cfg").read_text()
        # Scripts name their interpreter by its absolute path, so a moved environment is a broken one.
        if not any(line.startswith("command = ") and line.endswith(f" {venv}") for line in made_by.splitlines()):
            return False
        answer = subprocess.run(
            [str(venv / "bin" / "python"), "-c", "import pip, sys; print('%d.%d' % sys.version_info[:2])"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        )
    except OSError:
        return False
    return answer.returncode == 0 and answer.stdout.decode().strip() == "{}.{}".format(*sys.version_info[:2])


def is_whole(venv: Path) -> bool:
    """Whether no installed file is missing or cut short: pip takes what has its metadata in place for installed."""
    return subprocess.run([str(venv / "bin" / "python"), "-c", WHOLENESS_CHECK], check=False).returncode == 0


def create(venv: Path) -> None:
    """Make an empty environment with pip, in place of whatever is there."""
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=False).returncode:
        raise SetupError(
            f"{sys.executable} cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)"
        )


def install(venv: Path, torch_index_url: str) -> None:
    """Install the pinned development environment and this checkout, editable."""
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--constraint", str(CONSTRAINTS)]
    if not sys.stdout.isatty():
        pip.append("--quiet")
    # The warning that setuptools gives on every editable installation is for people who chose it unknowingly.
    environment = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_NO_INPUT="1", PYTHONWARNINGS="ignore")
    commands = [[*pip, "setuptools"]]
    if torch_index_url:
        # That index serves torch and need not have the rest, which comes from the usual one in the next step.
        commands.append([*pip, "--no-deps", "--index-url", torch_index_url, "torch"])
    commands.append([*pip, "--no-build-isolation", "--editable", f"{REPOSITORY}[dev]"])
    for command in commands:
        if subprocess.run(command, env=environment, check=False).returncode:
            raise SetupError(f"pip failed (see above): {' '.join(command)}")


def set_up(venv: Path, torch_index_url: str) -> None:
    """Bring the environment up to date. Two of these at once take turns."""
    refuse_unsupported(platform.system(), platform.machine(), sys.version_info[:2])
    stamp, wanted = venv / STAMP_NAME, fingerprint(venv, torch_index_url)
    with CONSTRAINTS.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        usable, found = is_usable(venv), stamp.read_text() if stamp.exists() else None
        if usable and found == wanted:
            return
        print(f"setting up {venv} (the first time takes minutes)", flush=True)
        if not usable or (found is None and not is_whole(venv)):
            create(venv)
        else:
            stamp.unlink(missing_ok=True)
        install(venv, torch_index_url)
        stamp.write_text(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=REPOSITORY / ".venv", help="where the environment is")
    parser.add_argument("--torch-index-url", default="", help="package index that torch alone is taken from")
    options = parser.parse_args()
    try:
        set_up(Path(os.path.abspath(options.venv)), options.torch_index_url)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
