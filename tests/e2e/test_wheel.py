"""What `make dist` builds, in an environment without this checkout: the command starts a cluster, the program runs."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from kvpool.testing import eventually_sync
from tests.e2e.cli_cluster import SMALL, Cluster
from tests.fixtures.patience import PATIENCE_S

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
SHARE_PREFIX = REPOSITORY / "examples/share_prefix.py"
KEEP_OBJECTS = REPOSITORY / "examples/keep_objects.py"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel and, for what it depends on, the packages of this one, but not this checkout."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"  # a build leaves files in the tree
    for name in ("clients/python", "services"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*build, "--wheel-dir", str(directory)], check=True, timeout=200, cwd=directory, env=ENVIRONMENT)
    (wheel,) = directory.glob("kvpool-*.whl")
    environment = directory / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    packages = next((environment / "lib").glob("python3.*")) / "site-packages"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*install, str(wheel)], check=True, timeout=200, cwd=directory, env=ENVIRONMENT)
    # Only the directory: files of editable installs in it are not read.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def test_the_wheel_starts_a_cluster_and_runs_the_examples(python: Path, tmp_path: Path) -> None:
    command = [str(python.with_name("kvpool")), "--state-dir", str(tmp_path / "state")]

    def run(*argv: str) -> str:
        return subprocess.run(
            argv, check=True, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=120
        ).stdout

    where = run(str(python), "-c", "import kvpool; print(kvpool.__file__)")
    assert where.startswith(str(python.parents[1])), "the checkout is imported, not the wheel"
    run(*command, "cluster", "up", "--detach", "--memory-index", *SMALL)
    try:
        state = Cluster(tmp_path / "state").state
        agent, pagestore = (f"unix:{state.of_role(role)[0].endpoints['socket']}" for role in ("agent", "pagestore"))
        index = state.of_role("index")[0].endpoints["endpoint"]

        def says(text: str) -> bool:
            """It has the defaults of production: who is late costs it the connection, or chunks."""
            try:
                return run(str(python), str(SHARE_PREFIX), agent) == f"{text}\n"
            except subprocess.CalledProcessError:
                return False

        eventually_sync(lambda: says("0 tokens loaded, 2 chunks stored"), 2 * PATIENCE_S)
        eventually_sync(lambda: says("256 tokens loaded, 0 chunks stored"), 2 * PATIENCE_S)
        keep_objects = (str(python), str(KEEP_OBJECTS), pagestore, index)
        assert run(*keep_objects).startswith("0 objects loaded, ")
        eventually_sync(lambda: run(*keep_objects) == "8 objects loaded, 0 stored\n", 2 * PATIENCE_S)
    finally:
        run(*command, "cluster", "down")
