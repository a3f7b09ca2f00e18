"""Metis (Um et al., USENIX ATC 2024): enumerate how devices form stages, and balance the layers of each.

Objective: sum C + sum c + (M - 1) max C + the longest all-reduce, from the true times of the group's own devices
(fluid split, the paper's data balancer) and the true links (the paper has one bandwidth a device type; the full
matrix says more). The paper enumerates orders of device types and shapes of groups; here every assignment of all K
devices to S stages in order, where interchangeable devices count once.

The load balancer of an assignment: layers in proportion to the speed of the groups (1 / time for all layers, summed
over the devices), rounded so that the most overloaded group is least so; up to ATTEMPTS times, where a stage overflows
its memory, its share is cut to 0.9 of what fits and the rest goes to the stages with room, in proportion to that room;
then layers move from the slowest stage to its neighbours one by one while that improves the objective. Unlike the
published code, the result does not depend on hashing, and any number of devices is allowed. Plans that fit in memory
come first.

Cap: MAX_ASSIGNMENTS; K = 8 devices that all differ stay below it for every S.
"""

import numpy as np
from numba import njit

from .. import cost
from ..cost import ALL_REDUCE, BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD
from ..device_sets import same_before
from ..problem import Problem, Strategy
from ..search import cuts_by_share, device_speed, layer_work
from . import assignments
from .assignments import PlannerLimit

MAX_ASSIGNMENTS = 200_000
ATTEMPTS = 3


def solve(problem: Problem) -> Strategy:
    """The best balanced plan over all assignments. Raises PlannerLimit."""
    S = problem.stages
    same = same_before(problem)
    n = assignments.count(same, S)
    if n > MAX_ASSIGNMENTS:
        raise PlannerLimit(f"metis: {n:.3g} different assignments of {problem.devices} devices to {S} stages; "
                           f"allowed: at most {MAX_ASSIGNMENTS}")
    return balance(problem, assignments.labels(same, S))


def balance(problem: Problem, labels: np.ndarray) -> Strategy:
    """The best plan over assignments labels [N, K], each balanced."""
    layer_s = problem.forward_s + problem.backward_s
    row, bounds = _best(cost.pack(problem), labels, problem.stages, problem.micro_batches, device_speed(layer_s),
                        layer_work(layer_s))
    order, starts = np.zeros(problem.devices, np.int64), np.zeros(problem.stages + 1, np.int64)
    assignments.read_labels(labels[row], order, starts)
    return cost.decode(bounds, order, starts)


def objective(problem: Problem, strategy: Strategy) -> float:
    """s of sum C + sum c + (M - 1) max C + max all-reduce on the true devices and links."""
    return _value(cost.stage_arrays(problem, strategy).matrix(), problem.micro_batches)


@njit(cache=True)
def _value(stages, M):
    total = largest = reduce = 0.0
    for s in range(stages.shape[1]):
        own = stages[FORWARD, s] + stages[BACKWARD, s]
        total += own + stages[SEND_FORWARD, s] + stages[SEND_BACKWARD, s]
        largest = max(largest, own)
        reduce = max(reduce, stages[ALL_REDUCE, s])
    return total + (M - 1) * largest + reduce


@njit(cache=True)
def _best(p, labels, S, M, speed, work):
    K = p.memory.shape[0]
    order, starts, share = np.zeros(K, np.int64), np.zeros(S + 1, np.int64), np.zeros((1, S))
    space = np.zeros((5, S)), np.zeros(K), np.zeros(K)
    best, best_overflow, best_row, best_bounds = np.inf, np.inf, 0, np.zeros(S + 1, np.int64)
    for row in range(labels.shape[0]):
        assignments.read_labels(labels[row], order, starts)
        for s in range(S):
            share[0, s] = 0.0
            for k in range(starts[s], starts[s + 1]):
                share[0, s] += speed[order[k]]
        share /= share.sum()
        bounds = cuts_by_share(work, share)[0]
        value, overflow = _evaluate(p, bounds, order, starts, M, space)
        for _ in range(ATTEMPTS - 1):
            if overflow == 0.0 or not _cut_to_memory(p, order, starts, share, space):
                break
            bounds = cuts_by_share(work, share)[0]
            value, overflow = _evaluate(p, bounds, order, starts, M, space)
        value, overflow = _descend(p, bounds, order, starts, M, value, overflow, space)
        if overflow < best_overflow or (overflow == best_overflow and value < best):
            best, best_overflow, best_row = value, overflow, row
            best_bounds[:] = bounds
    return best_row, best_bounds


@njit(cache=True)
def _evaluate(p, bounds, order, starts, M, space):
    """The objective and the bytes over memory."""
    stages, used, share = space
    overflow = cost.fill_stage_arrays(p, bounds, order, starts, stages, used, share)
    return _value(stages, M), overflow


@njit(cache=True)
def _cut_to_memory(p, order, starts, share, space):
    """Move shares [1, S] of the work from stages that overflow to those with room; False if that is too small."""
    used = space[1]
    S = share.shape[1]
    room = np.zeros(S)
    excess = 0.0
    for s in range(S):
        fits = np.inf
        for k in range(starts[s], starts[s + 1]):
            fits = min(fits, p.memory[order[k]] / max(used[order[k]], 1.0))
        if fits < 1.0:
            excess += share[0, s] * (1.0 - 0.9 * fits)
            share[0, s] *= 0.9 * fits
        else:
            room[s] = share[0, s] * (fits - 1.0)
    if room.sum() < excess:
        return False
    share[0] += excess * room / room.sum()
    return True


@njit(cache=True)
def _descend(p, bounds, order, starts, M, value, overflow, space):
    """Move layers out of the slowest stage, in place, while the objective falls and memory is no worse."""
    stages = space[0]
    S = stages.shape[1]
    slowest = np.argmax(stages[FORWARD] + stages[BACKWARD])
    tried = 0
    while tried < 2:
        # first over the boundary before the stage, then over the one after it
        boundary = slowest + tried
        tried += 1
        if boundary == 0 or boundary == S or bounds[slowest + 1] - bounds[slowest] == 1:
            continue
        shift = 1 if boundary == slowest else -1
        bounds[boundary] += shift
        new, new_overflow = _evaluate(p, bounds, order, starts, M, space)
        if new < value and new_overflow <= overflow:
            value, overflow = new, new_overflow
            slowest = np.argmax(stages[FORWARD] + stages[BACKWARD])
            tried = 0
        else:
            bounds[boundary] -= shift
    return value, overflow
