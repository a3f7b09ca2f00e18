"""Alpa's inter-operator program (Zheng et al., OSDI 2022, section 5.2): sum C + (M - 1) max C on equal devices.

For every cap on max C a program over layers and devices finds the least sum C. C of layers i .. j - 1 on n devices is
work / n + all-reduce / M over the mean link: the paper's stage latency includes the communication inside the stage, and
replicas synchronise once in M micro-batches. n is free (the paper's submesh shapes; here a device is a host of its own,
so every n is allowed) and all K devices are used. Between stages the model has no link term. Memory is respected;
`completion` names the devices.
"""

import numpy as np
from numba import njit

from ..problem import Problem, Strategy
from . import caps, chain
from .completion import solve_equal


def solve(problem: Problem) -> Strategy:
    """The plan with the least sum C + (M - 1) max C, completed."""
    def program(e, memory):
        load = _loads(e)

        def under_cap(cap, limit):
            value, choice = chain.program(load, e, memory, problem.stages, cap, False)
            if not value[-1] < limit:
                return np.inf, np.inf, None
            bounds, sizes = chain.read_plan(choice, e.devices)
            return value[-1], max(load[n, i, j] for n, i, j in zip(sizes, bounds, bounds[1:])), (bounds, sizes)

        return caps.minimise(np.unique(load[np.isfinite(load)]), e.micro_batches, under_cap)[1]

    return solve_equal(problem, program)


def objective(problem: Problem, strategy: Strategy) -> float:
    """s of sum C + (M - 1) max C on equal devices."""
    stages = chain.stage_loads(_loads(chain.equal_devices(problem)), strategy)
    return sum(stages) + (problem.micro_batches - 1) * max(stages)


@njit(cache=True)
def _loads(e):
    """[K + 1, L + 1, L + 1] C."""
    L, K = len(e.work) - 1, e.devices
    load = np.full((K + 1, L + 1, L + 1), np.inf)
    for n in range(1, K + 1):
        for i in range(L):
            for j in range(i + 1, L + 1):
                load[n, i, j] = (e.work[j] - e.work[i]) / n + chain.all_reduce(e, n, i, j) / e.micro_batches
    return load
