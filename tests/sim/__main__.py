"""`python -m tests.sim --seeds 1000`: many short histories, or one of them with a trace."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from tests.sim.client_parts import ClientCounts
from tests.sim.history import Report, run_history
from tests.sim.mutants import MUTANTS

_COLLECT_EACH = 20  # histories


def main(argv: Sequence[str]) -> int:
    """Exit code 1 if a history broke a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", default="1000", help="how many, or FIRST-LAST")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="say everything that happens")
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="plant this bug: the histories must fail")
    parser.add_argument("--mutants", nargs="+", choices=sorted(MUTANTS), help="plant one after the other, and tell")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no history after so long")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    options = parser.parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of bytes would have another order in each process
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.sim", *argv], environment)
    first, last = (options.seed, options.seed) if options.seed is not None else _range(options.seeds)
    if options.mutants:
        return _plant(options.mutants, range(first, last + 1))
    with MUTANTS[options.mutant]() if options.mutant else nullcontext():
        return _run(
            range(first, last + 1),
            trace=print if options.trace else None,
            keep_going=options.keep_going,
            until_s=time.monotonic() + 60 * options.minutes,
        )


def _run(seeds: range, *, trace: Callable[[str], None] | None, keep_going: bool, until_s: float) -> int:
    started_s, failed, total = time.process_time(), 0, ClientCounts()
    callbacks = virtual_s = 0.0
    gc.disable()  # a history's world is one large cycle, collected as a whole
    gc.freeze()  # the modules are not looked at again
    for seed in seeds:
        if seed % _COLLECT_EACH == 0:
            gc.collect()
        report = run_history(seed, trace=trace)
        callbacks += report.callbacks
        virtual_s += report.virtual_s
        _add(total, report.counts)
        if report.violations:
            failed += 1
            _show(report)
            if not keep_going:
                break
        if time.monotonic() > until_s:
            break
    took_s = time.process_time() - started_s
    count = seed - seeds.start + 1
    rate = f"{count / took_s:.0f} per second of processor time"
    each = f"{callbacks / count:.0f} callbacks and {virtual_s / count:.1f} virtual seconds each"
    pages = f"{total.stored} pages stored, {total.hits} hits, {total.misses} misses"
    print(f"{count} histories, {failed} failed, {rate}, {each}")
    print(f"{total.operations} operations: {pages}, {total.errors} errors")
    return 1 if failed else 0


def _plant(mutants: Sequence[str], seeds: range) -> int:
    """Say which history finds each mutant; exit code 1 if one is not found."""
    failed = 0
    gc.disable()
    gc.freeze()
    for name in mutants:
        violation, seed = _first_violation(name, seeds)
        if not violation:
            print(f"{name} is NOT found by {len(seeds)} histories")
        elif any(fault in violation for fault in ("TypeError(", "AttributeError(")):
            print(f"{name} does NOT fit the code any more: {violation}")
        else:
            print(f"{name} is found by seed {seed}: {violation}")
            continue
        failed += 1
    return 1 if failed else 0


def _first_violation(mutant: str, seeds: range) -> tuple[str, int]:
    """What the first history says that finds it, and its seed; empty if none does."""
    with MUTANTS[mutant]():
        for seed in seeds:
            if seed % _COLLECT_EACH == 0:
                gc.collect()
            if violations := run_history(seed).violations:
                return violations[0], seed
    return "", 0


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return (int(first), int(last)) if last else (0, int(first) - 1)


def _add(total: ClientCounts, counts: ClientCounts) -> None:
    for name in ("stored", "hits", "misses", "errors", "operations"):
        setattr(total, name, getattr(total, name) + getattr(counts, name))


def _show(report: Report) -> None:
    print(f"seed {report.seed} broke a promise:")
    for violation in report.violations:
        print(f"  {violation}")
    for fault in report.faults:
        print(f"    {fault}")
    print(f"  replay: python -m tests.sim --seed {report.seed} --trace")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
