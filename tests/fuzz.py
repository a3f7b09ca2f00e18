"""Hostile inputs by the thousand: python -m tests.fuzz --cases 10000 --seed 0

Every case must end in a valid answer or one clear line; `answers` says what that is. A case that does not is kept, with
its files, in runs/fuzz/, and can be run alone: python -m tests.fuzz --seed 0 --only 1234. Exit code 1 if there is any.
"""

import argparse
import faulthandler
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from answers import Late, check, compile_kernels
from hostile import make

LIMIT_S = 60.0
KEPT = Path("runs/fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.cases) if options.only is None else [options.only]
    compile_kernels()
    codes, failures, slowest, begin = Counter(), [], (0.0, None), time.perf_counter()
    for done, number in enumerate(numbers, 1):
        start = time.perf_counter()
        kind, outcome = _one(options.seed, number)
        slowest = max(slowest, (time.perf_counter() - start, number))
        codes[kind, outcome] += 1
        if outcome == "failed":
            failures.append(number)
        if done % 500 == 0 or done == len(numbers):
            print(f"{done} cases, {len(failures)} failed, {time.perf_counter() - begin:.0f} s, the slowest "
                  f"{slowest[0]:.1f} s (case {slowest[1]})", flush=True)
    for kind in sorted({kind for kind, _ in codes}):
        print(f"{kind:22}" + "".join(f"  {outcome}: {codes[kind, outcome]:5}" for outcome in (0, 2, 3, "failed")))
    return 1 if failures else 0


def _one(seed, number):
    """The kind of a case, and its exit code or "failed"."""
    folder = Path(tempfile.mkdtemp(prefix="nnpiper-fuzz-"))
    try:
        case = make(seed, number, folder)
        # compiled code does not look at signals: where it hangs, this ends the process with a trace
        faulthandler.dump_traceback_later(5 * LIMIT_S, exit=True)
        try:
            return case.kind, check(case, folder, LIMIT_S)
        except (Exception, Late):
            print(f"case {number}, {case.kind}: {ascii(case.command)}", flush=True)
            traceback.print_exc(limit=-6, file=sys.stdout)
            kept = KEPT / f"{seed}-{number}"
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir(parents=True)
            for path in folder.rglob("*"):
                if path.is_file() and path.stat().st_size < 1 << 26:
                    shutil.copy(path, kept)
            return case.kind, "failed"
        finally:
            faulthandler.cancel_dump_traceback_later()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
