"""Alpa's program made aware of heterogeneity: the strongest reading of "dynamic programming" that keeps a device order.

Objective as Alpa's with a link term, sum C + sum c + (M - 1) max C, but C from the true times of the group's own
devices (fluid split, as in `cost`) and c from the true links between neighbouring groups. C includes the all-reduce
of the group at 1 / M, as in `alpa`. Devices stay in the given order; a group is a contiguous run of them, and devices
may stay unused. Memory is respected exactly. The optimum of the objective is found exactly (relative 1e-9).

Under each cap on max C (`caps`) two programs run. c of two neighbours depends on the shares a(k) in both, and so on the
layers of both stages; where devices differ in speed alone the shares depend on the run only. So:
1. the relaxed program takes each share at its least over all stages of a run that end (or start) at the boundary. Its
   state is (stage, run, first layer), its value a lower bound, and its plan often attains it.
2. else the exact program over states (stage, run, first layer, last layer) that the bounds from both sides leave.
Cap: MAX_BYTES, what the tables of all runs take.

Symbols: R runs, run r holds devices first[r] .. last[r] - 1; i, j first layer of a stage and of the next.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from .. import cost
from ..cost import ALL_REDUCE, BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD
from ..problem import Problem, Strategy
from . import caps
from .assignments import PlannerLimit

MAX_BYTES = 2 * 10**9  # K = 56 devices with 80 layers stay below it
TIGHT = 1e-9  # relative; a plan this close to its lower bound is optimal


class Tables(NamedTuple):
    """Costs of all runs of devices."""

    first: np.ndarray  # [R] first device
    last: np.ndarray  # [R] last device + 1
    compute: np.ndarray  # [R, L + 1, L + 1] s, C of layers i .. j - 1
    from_stage: np.ndarray  # [R, L + 1, L + 1] first stage at which these layers fit in memory (later ones fit too)
    link: np.ndarray  # [R, R, L + 1] s, lower bound of c at the boundary before layer j; inf where r2 is not after r1


def solve(problem: Problem) -> Strategy:
    """The plan with the least objective; where nothing fits in memory, that without a limit. Raises PlannerLimit."""
    L, K, longest = problem.layers, problem.devices, problem.devices - problem.stages + 1
    runs = sum(min(longest, K - first) for first in range(K))
    size = 8 * runs * (L + 1) * (runs + 2 * (L + 1) + 2 * K)
    if size > MAX_BYTES:
        raise PlannerLimit(f"alpa-hetero: tables of {size:.3g} bytes for {runs} runs of {K} devices and {L} layers; "
                           f"allowed: at most {MAX_BYTES:.3g}")
    plan = _plan(problem)
    if plan is None:
        plan = _plan(problem.without_memory_limit())
    return plan


def objective(problem: Problem, strategy: Strategy) -> float:
    """s of sum C + sum c + (M - 1) max C on the true devices and links; C with all-reduce / M."""
    total, largest = _parts(problem, strategy)
    return total + (problem.micro_batches - 1) * largest


def _parts(problem, strategy):
    stages = cost.stage_arrays(problem, strategy)
    work = stages.forward_s + stages.backward_s + stages.all_reduce_s / problem.micro_batches
    return float(work.sum() + stages.send_forward_s.sum() + stages.send_backward_s.sum()), float(work.max())


def _plan(problem):
    S = problem.stages
    p = cost.pack(problem)
    tables = _tables(p, S, problem.micro_batches)

    def strategy_of(runs, bounds):
        return Strategy(tuple(bounds[1:-1].tolist()),
                        tuple(tuple(range(tables.first[r], tables.last[r])) for r in runs))

    def under_cap(cap, limit):
        total, runs, bounds, rest, onward = _relaxed(tables, S, cap)
        if not total < limit:
            return np.inf, np.inf, None
        plan = strategy_of(runs, bounds)
        attained, largest = _parts(problem, plan)
        if attained > total * (1.0 + TIGHT):
            total, runs, bounds = _exact(p, tables, S, cap, min(limit, attained * (1.0 + TIGHT)), rest, onward)
            if total == np.inf:
                return np.inf, np.inf, None
            plan = strategy_of(runs, bounds)
            attained, largest = _parts(problem, plan)
        # the maximum as the table has it, which rounding may set apart from the cost model's
        largest = max(tables.compute[r, i, j] for r, i, j in zip(runs, bounds, bounds[1:]))
        return attained, largest, plan

    return caps.minimise(np.unique(tables.compute[np.isfinite(tables.compute)]), problem.micro_batches, under_cap)[1]


@njit(cache=True)
def _tables(p, S, M):
    L, K = p.output.shape[0], p.memory.shape[0]
    R = 0
    for q in range(K):
        R += min(K, q + K - S + 1) - q
    first, last = np.zeros(R, np.int64), np.zeros(R, np.int64)
    r = 0
    for q in range(K):
        for end in range(q + 1, min(K, q + K - S + 1) + 1):
            first[r], last[r] = q, end
            r += 1

    compute = np.full((R, L + 1, L + 1), np.inf)
    from_stage = np.full((R, L + 1, L + 1), S)
    low_end, low_start = np.ones((R, L + 1, K)), np.ones((R, L + 1, K))  # least share of each device of a run
    order, bounds, starts = np.arange(K), np.zeros(2, np.int64), np.zeros(2, np.int64)
    out, used, share = np.zeros((5, 1)), np.zeros(K), np.zeros(K)
    for r in range(R):
        starts[0], starts[1] = first[r], last[r]
        for i in range(L):
            for j in range(i + 1, L + 1):
                bounds[0], bounds[1] = i, j
                cost.fill_stage(p, bounds, order, starts, 0, out, used, share)
                compute[r, i, j] = out[FORWARD, 0] + out[BACKWARD, 0] + out[ALL_REDUCE, 0] / M
                for s in range(S - 1, -1, -1):
                    if not _fits(p, s, i, j, first[r], last[r], share):
                        break
                    from_stage[r, i, j] = s
                for k in range(first[r], last[r]):
                    low_end[r, j, k] = min(low_end[r, j, k], share[k])
                    low_start[r, i, k] = min(low_start[r, i, k], share[k])

    link = np.full((R, R, L + 1), np.inf)
    space = _link_space(K)
    for r in range(R):
        for r2 in range(R):
            if last[r] <= first[r2]:
                for j in range(1, L):
                    link[r, r2, j] = _link(p, j, first[r], last[r], low_end[r, j],
                                           first[r2], last[r2], low_start[r2, j], space)
    return Tables(first, last, compute, from_stage, link)


@njit(cache=True)
def _fits(p, s, i, j, first, last, share):
    static = p.static[j] - p.static[i]
    stash = (p.stash[j] - p.stash[i]) * p.in_flight[s]
    for k in range(first, last):
        if static + share[k] * stash > p.memory[k]:
            return False
    return True


@njit(cache=True)
def _link_space(K):
    return np.zeros(3, np.int64), np.zeros(K, np.int64), np.zeros(3, np.int64), np.zeros((5, 1)), np.zeros(K)


@njit(cache=True)
def _link(p, j, first, last, share, first2, last2, share2, space):
    """c of the boundary before layer j between two runs with the shares [K] of their devices."""
    bounds, order, starts, out, both = space
    bounds[1] = j
    n = last - first
    starts[1], starts[2] = n, n + last2 - first2
    for k in range(first, last):
        order[k - first], both[k - first] = k, share[k]
    for k in range(first2, last2):
        order[n + k - first2], both[n + k - first2] = k, share2[k]
    cost.fill_sends(p, bounds, order, starts, 0, out, both)
    return out[SEND_FORWARD, 0] + out[SEND_BACKWARD, 0]


@njit(cache=True)
def _share(p, i, j, first, last, share):
    """a(k) of a run for layers i .. j - 1, as `cost.fill_stage` has it."""
    total = 0.0
    for k in range(first, last):
        alone = p.forward[j, k] - p.forward[i, k] + p.backward[j, k] - p.backward[i, k]
        share[k] = 1.0 / max(alone, 1e-30)
        total += share[k]
    for k in range(first, last):
        share[k] /= total


@njit(cache=True)
def _relaxed(t, S, cap):
    """Least sum, its runs [S] and bounds [S + 1]; and two lower bounds [S, R, L + 1]: rest, of stages s .. S - 1 with
    the first on run r from layer i; onward, of all that follows stage s on run r before layer j, c included."""
    R, L = t.compute.shape[0], t.compute.shape[1] - 1
    K = t.last.max()
    rest = np.full((S, R, L + 1), np.inf)
    onward = np.full((S, R, L + 1), np.inf)
    next_run, next_layer = np.zeros((S, R, L + 1), np.int64), np.zeros((S, R, L + 1), np.int64)
    for s in range(S - 1, -1, -1):
        after = S - 1 - s
        for r in range(R):
            if t.first[r] < s or t.last[r] > K - after:
                continue
            if after == 0:
                onward[s, r, L] = 0.0
            else:
                for r2 in range(R):
                    if t.last[r] <= t.first[r2] and t.last[r2] <= K - after + 1:
                        for j in range(s + 1, L - after + 1):
                            new = t.link[r, r2, j] + rest[s + 1, r2, j]
                            if new < onward[s, r, j]:
                                onward[s, r, j], next_run[s, r, j] = new, r2
            for i in range(s, L - after):
                for j in range(L if after == 0 else i + 1, L - after + 1):
                    own = t.compute[r, i, j]
                    if own <= cap and t.from_stage[r, i, j] <= s and own + onward[s, r, j] < rest[s, r, i]:
                        rest[s, r, i], next_layer[s, r, i] = own + onward[s, r, j], j
    runs, bounds = np.zeros(S, np.int64), np.zeros(S + 1, np.int64)
    runs[0] = rest[0, :, 0].argmin()
    total = rest[0, runs[0], 0]
    if total < np.inf:
        for s in range(S):
            bounds[s + 1] = next_layer[s, runs[s], bounds[s]]
            if s < S - 1:
                runs[s + 1] = next_run[s, runs[s], bounds[s + 1]]
    return total, runs, bounds, rest, onward


@njit(cache=True)
def _before(t, S, cap):
    """[S, R, L + 1] lower bound of all that precedes stage s on run r from layer i, c included."""
    R, L = t.compute.shape[0], t.compute.shape[1] - 1
    before = np.full((S, R, L + 1), np.inf)
    before[0, :, 0] = 0.0
    done = np.zeros(L + 1)
    for s in range(S - 1):
        for r in range(R):
            done[:] = np.inf
            for i in range(s, L):
                if before[s, r, i] < np.inf:
                    for j in range(i + 1, L):
                        if t.compute[r, i, j] <= cap and t.from_stage[r, i, j] <= s:
                            done[j] = min(done[j], before[s, r, i] + t.compute[r, i, j])
            for r2 in range(R):
                if t.last[r] <= t.first[r2]:
                    for j in range(s + 1, L):
                        before[s + 1, r2, j] = min(before[s + 1, r2, j], done[j] + t.link[r, r2, j])
    return before


@njit(cache=True)
def _exact(p, t, S, cap, limit, rest, onward):
    """Least sum below `limit` with its runs [S] and bounds [S + 1]; inf where there is none."""
    R, L = t.compute.shape[0], t.compute.shape[1] - 1
    K = p.memory.shape[0]
    before = _before(t, S, cap)
    count = 0
    for s in range(S):
        for r in range(R):
            for i in range(L):
                if before[s, r, i] + rest[s, r, i] < limit:
                    for j in range(i + 1, L + 1):
                        count += _alive(t, s, r, i, j, cap, limit, before, onward)
    # states by stage (last first), run and first layer; where[s, r, i] is the first of those that start there
    run, end, follow = np.zeros((3, count), np.int64)
    value = np.zeros(count)
    where = np.zeros((S, R, L + 1), np.int64)
    least = np.full((S, R, L + 1), np.inf)  # least value among them
    share, share2, space = np.zeros(K), np.zeros(K), _link_space(K)
    n = 0
    for s in range(S - 1, -1, -1):
        for r in range(R):
            for i in range(L):
                where[s, r, i] = n
                if before[s, r, i] + rest[s, r, i] >= limit:
                    continue
                for j in range(i + 1, L + 1):
                    if not _alive(t, s, r, i, j, cap, limit, before, onward):
                        continue
                    # what follows must stay below this for the whole to stay below the limit
                    most = limit - before[s, r, i] - t.compute[r, i, j]
                    best, best_next = (0.0, 0) if s == S - 1 else (most, 0)
                    if s < S - 1:
                        _share(p, i, j, t.first[r], t.last[r], share)
                        for r2 in range(R):
                            if t.last[r] > t.first[r2] or t.link[r, r2, j] + least[s + 1, r2, j] >= best:
                                continue
                            for y in range(where[s + 1, r2, j], where[s + 1, r2, j + 1]):
                                if t.link[r, r2, j] + value[y] < best:
                                    _share(p, j, end[y], t.first[r2], t.last[r2], share2)
                                    new = value[y] + _link(p, j, t.first[r], t.last[r], share,
                                                           t.first[r2], t.last[r2], share2, space)
                                    if new < best:
                                        best, best_next = new, y
                    if best < most:
                        run[n], end[n], follow[n] = r, j, best_next
                        value[n] = t.compute[r, i, j] + best
                        least[s, r, i] = min(least[s, r, i], value[n])
                        n += 1
            where[s, r, L] = n
    total, state = np.inf, 0
    for r in range(R):
        for x in range(where[0, r, 0], where[0, r, 1]):
            if value[x] < total:
                total, state = value[x], x
    runs, bounds = np.zeros(S, np.int64), np.zeros(S + 1, np.int64)
    if not total < limit:
        return np.inf, runs, bounds
    for s in range(S):
        runs[s], bounds[s + 1] = run[state], end[state]
        state = follow[state]
    return total, runs, bounds


@njit(cache=True)
def _alive(t, s, r, i, j, cap, limit, before, onward):
    """Whether layers i .. j - 1 on run r as stage s can be part of a plan below the limit."""
    own = t.compute[r, i, j]
    return own <= cap and t.from_stage[r, i, j] <= s and before[s, r, i] + own + onward[s, r, j] < limit
