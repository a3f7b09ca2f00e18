"""PipeEdge (Hu et al., 2022, algorithm 1): the least max(C, c) by a program over subsets of devices, one a stage.

C is the compute of a stage and c both transfers over the boundary after it, on the true link of the two devices (the
paper has one bandwidth a device and takes the smaller; the full matrix says more). Each stage has its own device, any S
of the K are used, and memory is respected. Where nothing fits in memory the optimum without a limit is returned.

The paper's state is (layers done, set of devices used, device of the last stage) with the least maximum as its value.
Here the maximum is found by bisection over the values that C and c can take; under a fixed limit the state (set, last
device) holds the boundaries that can be reached, as bits. That is the same optimum at a fraction of the work.

Cap: MAX_DEVICES, as the sets number 2^K.
"""

import numpy as np
from numba import njit

from .. import cost
from ..problem import Problem, Strategy
from .assignments import PlannerLimit

MAX_DEVICES = 18
WORD = 64  # bits


def solve(problem: Problem) -> Strategy:
    """A plan with the least max(C, c). Raises PlannerLimit."""
    if problem.devices > MAX_DEVICES:
        raise PlannerLimit(f"pipeedge: {problem.devices} devices; allowed: at most {MAX_DEVICES}, its sets number 2^K")
    plan = _plan(problem)
    if plan is None:
        plan = _plan(problem.without_memory_limit())
    return plan


def objective(problem: Problem, strategy: Strategy) -> float:
    """s of the slowest stage or boundary."""
    stages = cost.stage_arrays(problem, strategy)
    return float(max((stages.forward_s + stages.backward_s).max(),
                     (stages.send_forward_s + stages.send_backward_s).max(initial=0.0)))


def _plan(problem):
    S = problem.stages
    p = cost.pack(problem)
    compute, link = _tables(p)
    values = np.unique(np.concatenate([compute[np.isfinite(compute)], link[:, :, 1:-1].ravel()]))
    sets = _sets(problem.devices, S)

    def reached(limit):
        steps, open_ = _moves(p, compute, link, limit, S)
        return _reach(sets, steps, open_, S), steps, open_

    goal = sets[:, 1] == S
    word, bit = divmod(problem.layers, WORD)
    low, high = -1, len(values)  # values[low] is too small, values[high] is enough
    while high - low > 1:
        middle = (low + high) // 2
        reach = reached(values[middle])[0]
        if (reach[sets[goal, 0], :, word] >> np.uint64(bit) & np.uint64(1)).any():
            high = middle
        else:
            low = middle
    if high == len(values):
        return None
    reach, steps, open_ = reached(values[high])
    bounds, devices = _trace(sets, reach, steps, open_, S, problem.layers)
    return Strategy(tuple(bounds[1:-1].tolist()), tuple((k,) for k in devices.tolist()))


@njit(cache=True)
def _tables(p):
    """compute [K, L + 1, L + 1] of layers i .. j - 1 and link [K, K, L + 1] of the boundary before layer j, s."""
    L, K = p.output.shape[0], p.memory.shape[0]
    compute = np.full((K, L + 1, L + 1), np.inf)
    link = np.zeros((K, K, L + 1))
    for k in range(K):
        for i in range(L):
            for j in range(i + 1, L + 1):
                compute[k, i, j] = p.forward[j, k] - p.forward[i, k] + (p.backward[j, k] - p.backward[i, k])
        for h in range(K):
            if h != k:
                for j in range(1, L):
                    link[k, h, j] = (p.latency[k, h] + p.output[j - 1] * p.s_per_byte[k, h]
                                     + p.latency[h, k] + p.output[j - 1] * p.s_per_byte[h, k])
    return compute, link


def _sets(K, S):
    """[n, 2] non-empty sets of at most S devices as bit masks, ascending, and their sizes."""
    masks = np.arange(1, 2**K)
    sizes = sum(masks >> k & 1 for k in range(K))
    return np.stack([masks[sizes <= S], sizes[sizes <= S]], axis=1)


@njit(cache=True)
def _moves(p, compute, link, limit, S):
    """As bits over boundaries: steps [S, K, L + 1, words], where stage s of device k from layer i may end; open
    [K, K, words], where device k may hand over to device h."""
    K, L = compute.shape[0], compute.shape[1] - 1
    words = L // WORD + 1
    steps = np.zeros((S, K, L + 1, words), np.uint64)
    open_ = np.zeros((K, K, words), np.uint64)
    one = np.uint64(1)
    for k in range(K):
        for s in range(S):
            for i in range(L):
                for j in range(i + 1, L + 1):
                    used = p.static[j] - p.static[i] + (p.stash[j] - p.stash[i]) * p.in_flight[s]
                    if compute[k, i, j] > limit or used > p.memory[k]:
                        break
                    steps[s, k, i, j // WORD] |= one << np.uint64(j % WORD)
        for h in range(K):
            for j in range(1, L):
                if link[k, h, j] <= limit:
                    open_[k, h, j // WORD] |= one << np.uint64(j % WORD)
    return steps, open_


@njit(cache=True)
def _reach(sets, steps, open_, S):
    """[2^K, K, words] boundaries at which a pipeline on the set of devices with last device k can end."""
    K, L, words = steps.shape[1], steps.shape[2] - 1, steps.shape[3]
    reach = np.zeros((1 << K, K, words), np.uint64)
    ready = np.zeros(words, np.uint64)
    for n in range(sets.shape[0]):
        mask, size = sets[n, 0], sets[n, 1]
        for k in range(K):
            if mask >> k & 1:
                _ready(mask, k, reach, open_, ready)
                if not ready.any():
                    continue
                for i in range(size - 1, L):
                    if ready[i // WORD] >> np.uint64(i % WORD) & np.uint64(1):
                        for w in range(words):
                            reach[mask, k, w] |= steps[size - 1, k, i, w]
    return reach


@njit(cache=True)
def _ready(mask, k, reach, open_, ready):
    """Write the boundaries at which device k can take over from the other devices of the set."""
    others = mask ^ (1 << k)
    ready[:] = 0
    if others == 0:
        ready[0] = 1
    for h in range(open_.shape[0]):
        if others >> h & 1:
            for w in range(len(ready)):
                ready[w] |= reach[others, h, w] & open_[h, k, w]


@njit(cache=True)
def _trace(sets, reach, steps, open_, S, L):
    """Bounds [S + 1] and devices [S] of one pipeline that ends at L."""
    K, words = steps.shape[1], steps.shape[3]
    bounds, devices = np.zeros(S + 1, np.int64), np.zeros(S, np.int64)
    bounds[S] = L
    ready = np.zeros(words, np.uint64)
    mask = 0
    for n in range(sets.shape[0]):
        if sets[n, 1] == S:
            for k in range(K):
                if mask == 0 and reach[sets[n, 0], k, L // WORD] >> np.uint64(L % WORD) & np.uint64(1):
                    mask, devices[S - 1] = sets[n, 0], k
    for s in range(S - 1, -1, -1):
        k, j = devices[s], bounds[s + 1]
        _ready(mask, k, reach, open_, ready)
        for i in range(L):
            if (ready[i // WORD] >> np.uint64(i % WORD) & np.uint64(1)
                    and steps[s, k, i, j // WORD] >> np.uint64(j % WORD) & np.uint64(1)):
                bounds[s] = i
        mask ^= 1 << k
        for h in range(K):
            if (mask >> h & 1 and (reach[mask, h, bounds[s] // WORD] & open_[h, k, bounds[s] // WORD])
                    >> np.uint64(bounds[s] % WORD) & np.uint64(1)):
                devices[s - 1] = h
    return bounds, devices
