"""Brute force: the true optimum of the exact step among strategies that fit in memory, for tiny problems.

Every assignment of devices to stages (devices may stay unused; interchangeable devices count once) with every set of
cuts, depth first over the stages. A branch is left where compute alone, head(s) + M C(s) with head(s) the C of the
stages before, is no better than the best step so far, and a strategy is not simulated where its lower bound is none.
Where no strategy fits in memory the optimum without a limit is returned.

Cap: MAX_STRATEGIES assignments times cuts.
"""

import math

import numpy as np
from numba import njit

from .. import cost, simulator
from ..cost import BACKWARD, FORWARD
from ..problem import MAX_VALUE, Problem, Strategy
from . import assignments
from .assignments import PlannerLimit

MAX_STRATEGIES = 100_000_000


def solve(problem: Problem) -> Strategy:
    """A strategy with the least exact step. Raises PlannerLimit."""
    S = problem.stages
    same = assignments.same_before(problem)
    strategies = assignments.count(same, S, unused=True) * math.comb(problem.layers - 1, S - 1)
    if strategies > MAX_STRATEGIES:
        raise PlannerLimit(f"exact: {strategies:.3g} strategies of {problem.devices} devices, {problem.layers} layers "
                           f"and {S} stages; allowed: at most {MAX_STRATEGIES:.3g}")
    labels = assignments.labels(same, S, unused=True)
    arguments = (simulator.op_table(problem.schedule, S, problem.micro_batches), problem.transfers == "blocking",
                 problem.schedule == "1f1b", problem.micro_batches, labels, S)
    step, row, bounds = _search(cost.pack(problem), *arguments)
    if step == np.inf:
        unlimited = problem.replace(memory_bytes=np.full(problem.devices, MAX_VALUE))
        step, row, bounds = _search(cost.pack(unlimited), *arguments)
    order, starts = np.zeros(problem.devices, np.int64), np.zeros(S + 1, np.int64)
    assignments.read_labels(labels[row], order, starts)
    return cost.decode(bounds, order, starts)


@njit(cache=True)
def _search(p, ops, blocking, one_f_one_b, M, labels, S):
    """Least step, its row of labels and its bounds [S + 1]; inf where nothing fits in memory."""
    L, K = p.output.shape[0], p.memory.shape[0]
    bounds, order, starts = np.zeros(S + 1, np.int64), np.zeros(K, np.int64), np.zeros(S + 1, np.int64)
    stages, used, share, head = np.zeros((5, S)), np.zeros(K), np.zeros(K), np.zeros(S + 1)
    space = simulator.workspace(S, M)
    best, best_row, best_bounds = np.inf, 0, bounds.copy()
    for row in range(labels.shape[0]):
        assignments.read_labels(labels[row], order, starts)
        s = 0
        bounds[1] = 0
        while s >= 0:
            bounds[s + 1] = L if s == S - 1 and bounds[s + 1] < L else bounds[s + 1] + 1
            if bounds[s + 1] > L - (S - 1 - s):
                s -= 1
                continue
            overflow = cost.fill_stage(p, bounds, order, starts, s, stages, used, share)
            own = stages[FORWARD, s] + stages[BACKWARD, s]
            if overflow > 0.0 or head[s] + M * own >= best:
                if starts[s + 1] - starts[s] == 1:
                    s -= 1  # on one device, more layers only take more
                continue
            head[s + 1] = head[s] + own
            if s < S - 1:
                s += 1
                bounds[s + 1] = bounds[s]
                continue
            for boundary in range(S - 1):
                cost.fill_sends(p, bounds, order, starts, boundary, stages, share)
            if simulator.step_bound(stages, M, blocking, one_f_one_b) < best:
                step = simulator.run_step(ops, stages, blocking, space)
                if step < best:
                    best, best_row = step, row
                    best_bounds[:] = bounds
    return best, best_row, best_bounds
