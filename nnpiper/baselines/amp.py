"""AMP (Li et al., NeurIPS 2022): (M - 1) max C + sum C + sum c + the longest all-reduce, for each candidate placement.

Compute is the mean over devices divided by the replicas of the stage; c is the true link of each boundary, with even
shares in both groups. As in the paper all K devices are used with one degree, K / S replicas a stage (where S does not
divide K the first stages get one more). The candidate placements are the two axis orders of the stage x replica grid on
the given device order: replicas next to each other, or S apart. For each, a program over layers and stages under every
cap on max C (`caps`). The published code drops the link cost when it stores a state and adds the all-reduce after the
program; here the sum is kept whole, and the longest all-reduce is capped in turn, so that the whole is minimised.

The paper has no memory model; as the devices are known here, stages that overflow are left out, and where nothing fits
the optimum without a limit is returned.
"""

import numpy as np
from numba import njit

from .. import cost
from ..cost import ALL_REDUCE, SEND_BACKWARD, SEND_FORWARD
from ..problem import Problem, Strategy
from . import caps
from .even import even_starts


def solve(problem: Problem) -> Strategy:
    """The plan with the least objective over both placements."""
    plan = _plan(problem)
    if plan is None:
        plan = _plan(problem.without_memory_limit())
    return plan


def placements(problem: Problem) -> list[tuple[tuple[int, ...], ...]]:
    """The candidate groups of devices: replicas next to each other, or S apart."""
    K, S = problem.devices, problem.stages
    starts = even_starts(K, S)
    near = tuple(tuple(range(first, last)) for first, last in zip(starts, starts[1:]))
    far = tuple(tuple(range(s, K, S)) for s in range(S))
    return [near] if near == far else [near, far]


def objective(problem: Problem, strategy: Strategy) -> float:
    """s of (M - 1) max C + sum C + sum c + max all-reduce on mean devices and true links."""
    S = problem.stages
    unlimited = problem.without_memory_limit()
    load, reduce, link = _tables_of(unlimited, strategy.groups)
    bounds = strategy.bounds(problem.layers)
    stages = [load[s, bounds[s], bounds[s + 1]] for s in range(S)]
    return float(sum(stages) + sum(link[s, bounds[s + 1]] for s in range(S - 1))
                 + (problem.micro_batches - 1) * max(stages)
                 + max(reduce[s, bounds[s], bounds[s + 1]] for s in range(S)))


def _plan(problem):
    best, plan = np.inf, None
    for groups in placements(problem):
        load, reduce, link = _tables_of(problem, groups)
        values = np.unique(load[np.isfinite(reduce)])
        reduce_cap = np.finfo(float).max
        while len(values):
            def under_cap(cap, limit):
                total, bounds = _under_caps(load, reduce, link, cap, reduce_cap)
                if not total < limit:
                    return np.inf, np.inf, None
                return total, max(load[s, i, j] for s, (i, j) in enumerate(zip(bounds, bounds[1:]))), bounds

            value, bounds = caps.minimise(values, problem.micro_batches, under_cap)
            # a lower cap on the all-reduce can only raise the rest
            if bounds is None or value >= best:
                break
            longest = max(reduce[s, i, j] for s, (i, j) in enumerate(zip(bounds, bounds[1:])))
            if value + longest < best:
                best, plan = value + longest, Strategy(tuple(bounds[1:-1].tolist()), groups)
            if longest == 0.0:
                break
            reduce_cap = np.nextafter(longest, 0.0)
    return plan


def _tables_of(problem, groups):
    strategy = Strategy(tuple(range(1, problem.stages)), groups)
    _, order, starts = cost.encode([strategy], problem.layers, problem.devices)
    work = np.concatenate([[0.0], np.cumsum((problem.forward_s + problem.backward_s).mean(axis=1))])
    return _tables(cost.pack(problem), work, order[0], starts[0])


@njit(cache=True)
def _tables(p, work, order, starts):
    """load [S, L + 1, L + 1] s, C of layers i .. j - 1 as stage s; reduce, likewise, its all-reduce, inf where the
    stage overflows; link [S - 1, L + 1] s, c of boundary s before layer j."""
    L, K, S = p.output.shape[0], p.memory.shape[0], starts.shape[0] - 1
    load, reduce = np.full((S, L + 1, L + 1), np.inf), np.full((S, L + 1, L + 1), np.inf)
    link = np.zeros((S - 1, L + 1))
    bounds, out, used, share = np.zeros(S + 1, np.int64), np.zeros((5, S)), np.zeros(K), np.zeros(K)
    for s in range(S):
        for i in range(s, L):
            for j in range(i + 1, L + 1):
                bounds[s], bounds[s + 1] = i, j
                load[s, i, j] = (work[j] - work[i]) / (starts[s + 1] - starts[s])
                if cost.fill_stage(p, bounds, order, starts, s, out, used, share) == 0.0:
                    reduce[s, i, j] = out[ALL_REDUCE, s]
    for s in range(S):
        share[starts[s]:starts[s + 1]] = 1.0 / (starts[s + 1] - starts[s])
    for s in range(S - 1):
        for j in range(1, L):
            bounds[s + 1] = j
            cost.fill_sends(p, bounds, order, starts, s, out, share)
            link[s, j] = out[SEND_FORWARD, s] + out[SEND_BACKWARD, s]
    return load, reduce, link


@njit(cache=True)
def _under_caps(load, reduce, link, cap, reduce_cap):
    """Least sum C + sum c with every C <= cap and every all-reduce <= reduce_cap; its bounds [S + 1]."""
    S, L = load.shape[0], load.shape[1] - 1
    value = np.full((S + 1, L + 1), np.inf)
    value[0, 0] = 0.0
    choice = np.zeros((S + 1, L + 1), np.int64)
    for s in range(S):
        for i in range(s, L - (S - 1 - s)):
            before = value[s, i] + (link[s - 1, i] if s > 0 else 0.0)
            if before == np.inf:
                continue
            for j in range(i + 1, L - (S - 1 - s) + 1):
                if load[s, i, j] > cap:
                    break
                if reduce[s, i, j] <= reduce_cap and before + load[s, i, j] < value[s + 1, j]:
                    value[s + 1, j], choice[s + 1, j] = before + load[s, i, j], i
    bounds = np.zeros(S + 1, np.int64)
    bounds[S] = L
    for s in range(S, 0, -1):
        bounds[s - 1] = choice[s, bounds[s]]
    return value[S, L], bounds
