"""Piper (Tarnawski et al., NeurIPS 2021) on a chain: the least maximum load, compute plus transferred bytes.

The paper's program runs over down-sets of a graph, numbers of stages and of devices; the down-sets of a chain are its
prefixes. Load of layers i .. j - 1 with n replicas = (work + both ways of the activation in and out) / n + all-reduce
/ M, over the mean link; each transfer also has its latency. At most K devices are used (the fewest with the least
load) and memory is respected; a layer chain with measured times leaves no tensor parallelism to choose. `completion`
names the devices.
"""

import numpy as np
from numba import njit

from ..problem import Problem, Strategy
from . import chain
from .completion import solve_equal


def solve(problem: Problem) -> Strategy:
    """The plan with the least maximum load, completed."""
    def program(e, memory):
        value, choice = chain.program(_loads(e), e, memory, problem.stages, np.inf, True)
        return chain.read_plan(choice, int(value.argmin())) if np.isfinite(value).any() else None

    return solve_equal(problem, program)


def objective(problem: Problem, strategy: Strategy) -> float:
    """s of the largest load on equal devices."""
    return max(chain.stage_loads(_loads(chain.equal_devices(problem)), strategy))


@njit(cache=True)
def _loads(e):
    """[K + 1, L + 1, L + 1] load."""
    L, K = len(e.work) - 1, e.devices
    load = np.full((K + 1, L + 1, L + 1), np.inf)
    for n in range(1, K + 1):
        for i in range(L):
            arrive = 2.0 * (e.latency + e.output[i] * e.s_per_byte / n) if i > 0 else 0.0
            for j in range(i + 1, L + 1):
                leave = 2.0 * (e.latency + e.output[j] * e.s_per_byte / n) if j < L else 0.0
                load[n, i, j] = ((e.work[j] - e.work[i]) / n + arrive + leave
                                 + chain.all_reduce(e, n, i, j) / e.micro_batches)
    return load
