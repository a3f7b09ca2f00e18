"""Plans that keep within the devices' memory, where speed alone would break it.

Symbols: N strategies as `cost.encode` writes them, L layers, K devices, S stages.
"""

import numpy as np
from numba import njit

from . import cost, schedule, simulator
from .problem import Problem, Strategy
from .search import layer_work

HALVINGS = 6  # of the interval for the ratio in `_fit`, once doubling has found one


def fill(problem: Problem, room: float) -> Strategy | None:
    """A strategy with one device a stage that keeps within `room` of every device's memory, or None. It takes the
    devices by falling memory, since the first stages keep the most micro-batches, and fills each stage in turn; None
    does not prove that there is none."""
    S, L = problem.stages, problem.layers
    devices = np.argsort(-problem.memory_bytes, kind="stable")[:S]
    waiting = schedule.in_flight(problem.schedule, S, problem.micro_batches)
    bounds = [0]
    for s, device in enumerate(devices):
        need = np.cumsum(problem.static_bytes[bounds[s]:] + waiting[s] * problem.stash_bytes[bounds[s]:])
        most = int(np.searchsorted(need, problem.memory_bytes[device] * room, side="right"))
        if most == 0:
            return None
        bounds.append(bounds[s] + min(most, L - bounds[s] - (S - s - 1)))  # each later stage needs a layer
    return Strategy(tuple(bounds[1:-1]), tuple((int(device),) for device in devices)) if bounds[S] == L else None


def fit(problem: Problem, states: tuple, step_s: np.ndarray, overflow: np.ndarray) -> None:
    """Cut anew, in place, those of the N states (bounds, order, starts) that do not fit though other cuts would, and
    bring their steps [N] and bytes over memory [N] up to date. The devices stay where they are. Of the cuts that fit,
    those with the least ratio of any stage's work to what it had before. States whose step is no shorter than one
    that fits are left alone."""
    shortest = step_s[overflow == 0].min(initial=np.inf)
    rows = np.flatnonzero((overflow > 0) & (step_s < shortest))
    if len(rows):
        bounds, order, starts = (part[rows] for part in states)
        work = np.concatenate([[0.0], np.cumsum(layer_work(problem.forward_s + problem.backward_s))])
        _fit(cost.pack(problem), work, bounds, order, starts)
        states[0][rows] = bounds
        step_s[rows], overflow[rows] = simulator.step_times(problem, bounds, order, starts)


@njit(cache=True, error_model="numpy")
def _fit(p, work, bounds, order, starts):
    N, S = bounds.shape[0], bounds.shape[1] - 1
    wanted, new = np.empty(S), np.zeros(S + 1, np.int64)
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
        bounds[n] = new


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


@njit(cache=True, error_model="numpy")
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
