"""PipeDream (Narayanan et al., SOSP 2019, section 3.1): the program over layers and devices with replicated stages.

A(j, k) = least over i, n of max(A(i, k - n), t(i), T(i .. j - 1, n)): the slowest stage or transfer of a pipeline
over the first j layers and exactly k equal devices. T = max(work / n, all-reduce / M): the paper synchronises
replicas with every micro-batch and hides that behind compute; here, where a step has one all-reduce, M micro-batches
share it. t(i) is the transfer of the activation and its gradient into layer i over the mean link, which the published
code leaves out unless asked. All K devices are used and memory is respected; `completion` names the devices.
"""

import numpy as np
from numba import njit

from ..problem import Problem, Strategy
from . import chain
from .completion import solve_equal


def solve(problem: Problem) -> Strategy:
    """The plan with the least maximum, completed."""
    def program(e, memory):
        value, choice = chain.program(_loads(e), e, memory, problem.stages, np.inf, True)
        return chain.read_plan(choice, e.devices) if np.isfinite(value[-1]) else None

    return solve_equal(problem, program)


def objective(problem: Problem, strategy: Strategy) -> float:
    """s of the slowest stage or transfer on equal devices."""
    return max(chain.stage_loads(_loads(chain.equal_devices(problem)), strategy))


@njit(cache=True)
def _loads(e):
    """[K + 1, L + 1, L + 1] max of stage time and incoming transfer."""
    L, K = len(e.work) - 1, e.devices
    load = np.full((K + 1, L + 1, L + 1), np.inf)
    for n in range(1, K + 1):
        for i in range(L):
            arrive = 2.0 * (e.latency + e.output[i] * e.s_per_byte) if i > 0 else 0.0
            for j in range(i + 1, L + 1):
                stage = max((e.work[j] - e.work[i]) / n, chain.all_reduce(e, n, i, j) / e.micro_batches)
                load[n, i, j] = max(arrive, stage)
    return load
