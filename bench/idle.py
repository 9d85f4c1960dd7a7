"""What does an idle cluster of `kvpool cluster up` cost?

Starts one pagestore and one agent, lets them settle, and then measures the resident memory and the processor time of
every process. Resident memory is RssAnon + RssFile: the arena is shared memory with a budget of its own, and does not
count. The baseline of each figure is its upper limit.

Run: python -m bench.idle [--seconds 20] [--settle 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.process_usage import cpu_s
from kvpool_cli.output import as_text, table
from kvpool_cli.state import ClusterState, read_state

MEMORY_LIMITS_MIB = {"index": 100, "pagestore": 100, "agent": 450}
CPU_LIMIT_PERCENT = 3.0


def resident_mib(pid: int) -> float:
    """RssAnon + RssFile."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssFile:"))) / 1024


def measure(state: ClusterState, seconds: float) -> list[tuple[str, str, float, float]]:
    """(name, role, MiB, CPU %) of every process, the one that watches the others included."""
    pids = [(process.name, process.role, process.pid) for process in state.processes]
    pids.append(("up", "up", state.supervisor_pid))
    before = {pid: cpu_s(pid) for _, _, pid in pids}
    started_s = time.monotonic()
    time.sleep(seconds)  # the time that is measured
    elapsed_s = time.monotonic() - started_s
    return [(name, role, resident_mib(pid), 100 * (cpu_s(pid) - before[pid]) / elapsed_s) for name, role, pid in pids]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--settle", type=float, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        kvpool = [sys.executable, "-m", "kvpool_cli", "--state-dir", directory]
        subprocess.run([*kvpool, "cluster", "up", "--detach"], check=True, stdout=subprocess.DEVNULL)
        try:
            state = read_state(Path(directory))
            assert state is not None, "`up --detach` leaves a state"
            time.sleep(arguments.settle)
            found = measure(state, arguments.seconds)
        finally:
            subprocess.run([*kvpool, "cluster", "down"], check=True, stdout=subprocess.DEVNULL)
    cases = {
        f"idle memory, {name}": (mib, "MiB", float(MEMORY_LIMITS_MIB[role]))
        for name, role, mib, _ in found
        if role in MEMORY_LIMITS_MIB
    }
    cases["idle processor time, all"] = (sum(percent for *_, percent in found), "%", CPU_LIMIT_PERCENT)
    print(
        as_text(table(["process", "MiB", "CPU %"], [[n, f"{m:.1f}", f"{c:.2f}"] for n, _, m, c in found], right=[1, 2]))
    )
    rows = [[name, f"{v:.1f} {unit}", f"{most:g} {unit}", f"{v / most:.2f}"] for name, (v, unit, most) in cases.items()]
    print("\n" + as_text(table(["case", "value", "at most", "ratio"], rows, right=[1, 2, 3])))
    if arguments.json:
        document = {
            name: {"value": round(v, 3), "unit": unit, "baseline": most, "ratio": round(v / most, 4)}
            for name, (v, unit, most) in cases.items()
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
