"""Cuts that keep within the devices' memory, where a division of the layers by speed alone would break it.

Symbols: N strategies as `cost.encode` writes them, L layers, K devices, S stages.
"""

import numpy as np
from numba import njit

from . import cost, simulator
from .problem import Problem
from .search import layer_work

MOST = 48  # of N that are cut anew, those with the shortest steps: cutting 256 would take milliseconds
HALVINGS = 6  # of the interval for the ratio in `_fit`, once doubling has found one


def fit(problem: Problem, states: tuple, step_s: np.ndarray, overflow: np.ndarray) -> None:
    """Cut anew, in place, those of the N states (bounds, order, starts) that do not fit, where cuts are found that do,
    and bring their steps [N] and bytes over memory [N] up to date. The devices stay where they are.

    The stages are filled one after the other, each as far as its memory and a ratio to the work that it had before
    allow; the ratio is as small as this finds cuts with. There may be others: where a stage that takes one layer less
    would spare the next a layer that it cannot hold. Only the MOST with the shortest steps are tried, and none whose
    step is no shorter than that of one that fits.
    """
    shortest = step_s[overflow == 0].min(initial=np.inf)
    rows = np.flatnonzero((overflow > 0) & (step_s < shortest))
    rows = rows[np.argsort(step_s[rows], kind="stable")[:MOST]]
    if len(rows):
        bounds, order, starts = (part[rows] for part in states)
        work = np.concatenate([[0.0], np.cumsum(layer_work(problem.forward_s + problem.backward_s))])
        new = _fit(cost.pack(problem), work, bounds, order, starts)
        rows = rows[new]
        states[0][rows] = bounds[new]
        step_s[rows], overflow[rows] = simulator.step_times(problem, *(part[rows] for part in states))


@njit(cache=True, error_model="numpy")
def _fit(p, work, bounds, order, starts):
    """Write the new bounds; [N] bool, where there are any."""
    N, S = bounds.shape[0], bounds.shape[1] - 1
    found, wanted, new = np.zeros(N, np.bool_), np.empty(S), np.zeros(S + 1, np.int64)
    for n in range(N):
        for s in range(S):
            wanted[s] = work[bounds[n, s + 1]] - work[bounds[n, s]]
        if not _fill(p, work, wanted, np.inf, order[n], starts[n], new):
            continue  # whatever the cuts
        low, high = 1.0, 2.0
        while not _fill(p, work, wanted, high, order[n], starts[n], new):
            low, high = high, 2.0 * high
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            if _fill(p, work, wanted, middle, order[n], starts[n], new):
                high = middle
            else:
                low = middle
        _fill(p, work, wanted, high, order[n], starts[n], new)
        bounds[n], found[n] = new, True
    return found


@njit(cache=True, error_model="numpy")
def _fill(p, work, wanted, ratio, order, starts, bounds):
    """Give each stage in turn the layers that fit into its memory and into ratio x its wanted work; False if a stage
    cannot hold one, or some are left over."""
    L, S = work.shape[0] - 1, wanted.shape[0]
    for s in range(S):
        first, end = bounds[s], bounds[s] + 1
        if not _holds(p, first, end, order, starts, s):
            return False
        last = L - (S - 1 - s)  # each later stage needs a layer
        most = work[first] + ratio * wanted[s] + 1e-12
        while end < last and work[end + 1] <= most and _holds(p, first, end + 1, order, starts, s):
            end += 1
        bounds[s + 1] = end
    return bounds[S] == L


@njit(cache=True, error_model="numpy", inline="always")  # a call would copy all of p
def _holds(p, lo, hi, order, starts, s):
    """Whether these layers as stage s fit into the memory of each of its devices; shares as in `cost.fill_stage`."""
    static = p.static[hi] - p.static[lo]
    stash = (p.stash[hi] - p.stash[lo]) * p.in_flight[s]
    first, last = starts[s], starts[s + 1]
    if last - first == 1:
        return static + stash <= p.memory[order[first]]
    total = 0.0
    for i in range(first, last):
        k = order[i]
        total += 1.0 / max(p.forward[hi, k] - p.forward[lo, k] + p.backward[hi, k] - p.backward[lo, k], 1e-30)
    for i in range(first, last):
        k = order[i]
        share = 1.0 / max(p.forward[hi, k] - p.forward[lo, k] + p.backward[hi, k] - p.backward[lo, k], 1e-30) / total
        if static + share * stash > p.memory[k]:
            return False
    return True
