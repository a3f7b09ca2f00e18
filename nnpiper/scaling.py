"""Growth: processor time and memory of the solver's parts against one size of the problem at a time, and power laws.

Problems are virtual instances (virtual.py) of any size, 1F1B, blocking. Times are processor seconds of one thread, so
that other work on the machine counts less; they still differ from run to run. Symbols: L layers, K devices, S stages,
M micro-batches.
"""

import ctypes
import dataclasses
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from . import bound, cost, simulator, subset_program
from .experiments import MAX_WORKERS, Case, piper
from .problem import Problem
from .provenance import usable_cores
from .search import Search, proportional_state, random_state
from .solver import SAMPLES, polishing

SIZE_NAMES = {"devices": "K", "stages": "S", "layers": "L", "micro_batches": "M"}
PARTS = ("one simulation", "one move", "sampling", "solve")
BOUND = "certified bound"
SIMULATED_OPS = 400_000  # a few ms: one simulation is timed over many
TIMED_MOVES = 4000


@dataclass(frozen=True)
class Size:
    """The sizes of a problem."""

    devices: int = 16
    stages: int = 8
    layers: int = 50
    micro_batches: int = 32

    def problem(self, number: int) -> Problem:
        """Virtual instance `number` of this size."""
        return Case("virtual", "virtual", self.devices, self.stages, number, self.micro_batches, self.layers).problem()


def _sweep(base, changed, values):
    """(the name of the size that is changed, sizes) with all others as in `base`."""
    return [(changed, dataclasses.replace(base, **{changed: value})) for value in values]


BASE = Size()
LAYERS, MICRO_BATCHES = (16, 25, 50, 100, 200), (8, 16, 32, 64, 128, 256)
PART_SIZES = (*_sweep(BASE, "devices", (8, 16, 24, 32, 48, 64)), *_sweep(BASE, "stages", (2, 4, 8, 12, 16)),
              *_sweep(BASE, "layers", LAYERS), *_sweep(BASE, "micro_batches", MICRO_BATCHES))
# the bound's program numbers sets of devices, so fewer of them: one device a stage, and groups where stages change
BOUND_BASE = Size(devices=8, stages=8)
BOUND_SIZES = (*(("devices", Size(K, K)) for K in (4, 5, 6, 7, 8, 9, 10)),
               *_sweep(Size(devices=6), "stages", (2, 3, 4, 5, 6)), *_sweep(BOUND_BASE, "layers", LAYERS),
               *_sweep(BOUND_BASE, "micro_batches", MICRO_BATCHES))


def part_times(size: Size, checkpoint: Path, numbers: int, repeats: int) -> list[dict]:
    """Rows: processor time in s of each of PARTS, for each of `numbers` problems the median of `repeats`. A simulation
    is that of a plain start, and moves start there; sampling is what a solve begins with (SAMPLES groupings are drawn,
    divided and ranked); a solve is in the fixed setting."""
    network, rows = piper(checkpoint), []
    for number in range(numbers):
        problem = size.problem(number)
        works = {"one simulation": _simulations(problem), "one move": _moves(problem, number),
                 "sampling": (lambda: network.sample(problem, SAMPLES, 0), 1),
                 "solve": (lambda: network.solve(problem), 1)}
        rows += [{"part": part, "number": number, "cpu_s": median_cpu_s(*works[part], repeats)} for part in PARTS]
    return rows


def bound_times(size: Size, numbers: int, repeats: int) -> list[dict]:
    """Rows as `part_times`, of the certified bound from annealing's step; none where the program is out of reach and
    the bound is the simple one."""
    rows = []
    for number in range(numbers):
        problem = size.problem(number)
        if subset_program.build(problem, bound.MOST_KEYS, bound.MOST_PAIRS) is None:
            continue
        upper_s = bound.attained(problem)
        cpu_s = median_cpu_s(lambda: bound.lower_bound(problem, upper_s), 1, repeats)
        rows.append({"part": BOUND, "number": number, "cpu_s": cpu_s})
    return rows


def median_cpu_s(work: Callable, units: int, repeats: int) -> float:
    """Median processor time of work() / units in s; one call beforehand compiles it."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        times.append((time.process_time() - begin) / units)
    return float(np.median(times))


def _simulations(problem):
    bounds, order, starts = proportional_state(problem, np.arange(problem.devices))
    stages = cost.stage_arrays(problem, cost.decode(bounds, order, starts)).matrix()
    S, M = problem.stages, problem.micro_batches
    ops, space = simulator.op_table(problem.schedule, S, M), simulator.workspace(S, M)
    calls = max(SIMULATED_OPS // len(ops), 1)

    def work():
        for _ in range(calls):
            simulator.run_step(ops, stages, problem.transfers == "blocking", space)

    return work, calls


def _moves(problem, number):
    search = Search(problem)

    def work():
        state = proportional_state(problem, np.arange(problem.devices))
        search.run(state, TIMED_MOVES, polishing(problem), random_state(np.random.default_rng(number)))

    return work, TIMED_MOVES


def peak_memories(sizes: Iterable[Size], checkpoint: Path) -> list[float]:
    """MB that sampling SAMPLES groupings takes at its peak beyond what the process holds by then, the network loaded
    and all code compiled; a fresh process for each size, so that none finds memory that another one left. Linux alone.
    """
    start = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(MAX_WORKERS, usable_cores()), start, max_tasks_per_child=1) as pool:
        return list(pool.map(partial(_peak_mb, checkpoint=checkpoint), sizes))


def _peak_mb(size, checkpoint):
    network = piper(checkpoint)
    problem, other = size.problem(0), Size(4, 4, 8, 4).problem(0)
    network.sample(other.replace(memory_bytes=other.memory_bytes / 1e6), SAMPLES, 0)  # what makes plans fit loads too
    ctypes.CDLL(None).malloc_trim(0)  # what is free already goes back, or else it would not be seen when it is used
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts anew from here
    before = _status_mb("VmRSS")
    network.sample(problem, SAMPLES, 0)
    return _status_mb("VmHWM") - before


def _status_mb(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field + ":")) * 1024 / 1e6


def power_law(x: np.ndarray, y: np.ndarray) -> dict:
    """Least squares of log y = log a + b log x: `exponent` b with its 95 % interval (`low`, `high`, Student's t) and
    `coefficient` a. Three points or more of two different x or more, all over 0."""
    u, v = np.log(np.asarray(x, float)), np.log(np.asarray(y, float))
    centred = u - u.mean()
    b = (centred * v).sum() / (centred**2).sum()
    rest = v - v.mean() - b * centred
    freedom = len(u) - 2
    half = t_quantile(freedom) * math.sqrt((rest**2).sum() / freedom / (centred**2).sum())
    return {"exponent": b, "low": b - half, "high": b + half, "coefficient": math.exp(v.mean() - b * u.mean())}


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t (Abramowitz and Stegun 26.7.5; within 0.1 % from 6 degrees of freedom on, below
    that from a table)."""
    few = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706}
    if freedom in few:
        return few[freedom]
    z, n = 1.959964, freedom
    return (z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3))


def growth_table(rows: pd.DataFrame, value: str = "cpu_s") -> pd.DataFrame:
    """A row for every part and size that was changed (columns part, changed, size, value): the range, the median value
    at both ends, the exponent of the power law over all problems with its 95 % interval, and that between the medians
    at the two largest sizes, where fixed costs count least."""
    records = []
    for (part, changed), some in rows.groupby(["part", "changed"], sort=False):
        medians = some.groupby("size")[value].median()
        x, y = medians.index.to_numpy(float), medians.to_numpy()
        fit = power_law(some["size"], some[value])
        records.append({"part": part, "against": SIZE_NAMES[changed], "from": int(x[0]), "to": int(x[-1]),
                        "first": y[0], "last": y[-1], "exponent": fit["exponent"], "low": fit["low"],
                        "high": fit["high"], "exponent at the end": math.log(y[-1] / y[-2]) / math.log(x[-1] / x[-2])})
    return pd.DataFrame(records)
