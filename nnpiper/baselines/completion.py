"""From a plan that names no devices to a strategy: the same completion for every planner that assumes equal devices.

The stage with the heaviest load per device (mean time over all devices, divided by its replicas) gets the fastest
device(s), the next stage the next ones, and so on. A device is passed over where it is too small for the stage, or
where it would leave too little for the stages still to come, as long as any assignment fits at all.
"""

import numpy as np

from .. import cost
from ..problem import Problem, Strategy
from .chain import equal_devices


def solve_equal(problem: Problem, program) -> Strategy:
    """Plan on equal devices and complete.

    program(equal, memory_bytes) -> (bounds, sizes), or None where nothing fits in memory_bytes. It plans with the mean
    memory; if the completed plan overflows on some device, with the smallest memory; where nothing fits either way,
    without a limit.
    """
    equal = equal_devices(problem)
    first = None
    for memory in (problem.memory_bytes.mean(), problem.memory_bytes.min(), np.inf):
        plan = program(equal, memory)
        if plan is None:
            continue
        strategy = complete(problem, *plan)
        if cost.overflow_bytes(problem, strategy) == 0.0:
            return strategy
        first = first or strategy
    return first


def complete(problem: Problem, bounds, sizes) -> Strategy:
    """The strategy of stages bounds [S + 1] with sizes [S] devices each."""
    S = len(sizes)
    e = equal_devices(problem)
    bounds, sizes = np.asarray(bounds), np.asarray(sizes)
    load = np.diff(e.work[bounds]) / sizes
    need = np.diff(e.static[bounds]) + e.in_flight * np.diff(e.stash[bounds]) / sizes
    slots = [s for s in np.argsort(-load, kind="stable") for _ in range(sizes[s])]
    devices = np.argsort((problem.forward_s + problem.backward_s).sum(axis=0), kind="stable").tolist()
    if not _fits(need[slots], problem.memory_bytes[devices]):
        need = np.zeros(S)
    groups = [[] for _ in range(S)]
    for position, s in enumerate(slots):
        later = need[slots[position + 1:]]
        chosen = next(k for k in devices if problem.memory_bytes[k] >= need[s]
                      and _fits(later, problem.memory_bytes[[d for d in devices if d != k]]))
        groups[s].append(chosen)
        devices.remove(chosen)
    return Strategy(tuple(bounds[1:-1].tolist()), tuple(map(tuple, groups)))


def _fits(need, memory) -> bool:
    """Whether every need can have a device of its own: the largest on the largest, and so on down."""
    return bool((np.sort(memory)[::-1][:len(need)] >= np.sort(need)[::-1]).all())
