"""The best strategy under a closed form of the literature, to see what optimising a formula costs.

A form is one micro-batch through all stages and transfers, plus M - 1 times the slowest stage:
sum C + sum c + (M - 1) max T, with C = F + B of a stage and c both transfers over a boundary. Forms differ in what T
counts beside C: nothing (Alpa, AMP, Metis), c of the boundary after the stage (Sailor), what the stage itself sends
(its activation ahead, its gradient back), or c of both its boundaries. None knows the schedule or the transfer mode.

`solve` is exact, for one device a stage: a program over sets of devices finds the least sum under a limit on T, and the
limit falls from one plan's T to below the next until no shorter formula is possible. Symbols: L layers, K = S devices
and stages, M micro-batches; an *end* is the stages from s on, on the set x of devices.
"""

import numpy as np
from numba import njit

from . import cost
from .cost import BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD
from .problem import InputError, Problem, Strategy

# what of the transfers counts into T: ahead and back over the boundary after the stage, ahead and back over that before
FORMS = {
    "compute alone": (0.0, 0.0, 0.0, 0.0),
    "compute + next boundary": (1.0, 1.0, 0.0, 0.0),
    "compute + own sends": (1.0, 0.0, 0.0, 1.0),
    "compute + both boundaries": (1.0, 1.0, 1.0, 1.0),
}
MOST_DEVICES = 10  # the work grows as 2^K
BISECTIONS = 12  # of the limit before it falls step by step
STRICTLY = 1.0 - 1e-12  # below a limit


def formula(form: str, stages: cost.StageArrays, M: int) -> float:
    """Step in s by one of FORMS; all-reduces are left out, as there are none with one device a stage."""
    a = stages.matrix()
    return float(a[:SEND_BACKWARD + 1].sum() + (M - 1) * _terms(form, a).max())


def _terms(form, a):
    """[S] T of each stage of stage arrays [5, S]."""
    before = np.roll(a, 1, axis=1)  # the last column's sends are 0
    after_ahead, after_back, before_ahead, before_back = FORMS[form]
    return (a[FORWARD] + a[BACKWARD] + after_ahead * a[SEND_FORWARD] + after_back * a[SEND_BACKWARD]
            + before_ahead * before[SEND_FORWARD] + before_back * before[SEND_BACKWARD])


def solve(problem: Problem, form: str) -> Strategy:
    """The strategy within memory that the formula is least for; where none fits, that of the problem without a limit.
    Raises InputError unless each device has a stage of its own and there are at most MOST_DEVICES."""
    if problem.stages != problem.devices or problem.devices > MOST_DEVICES:
        raise InputError(f"stages: {problem.stages} on {problem.devices} devices; allowed: one device a stage, at most "
                         f"{MOST_DEVICES} devices")
    M, p, weights = problem.micro_batches, cost.pack(problem), np.array(FORMS[form])
    tables = _tables(p)

    def best_under(limit):
        """Least sum with all T <= limit, the plan's largest T, the plan; None where there is none."""
        bounds, devices = np.zeros(problem.stages + 1, np.int64), np.zeros(problem.stages, np.int64)
        total = _least_sum(p, *tables, weights, limit, bounds, devices)
        if total == np.inf:
            return None
        plan = Strategy(tuple(bounds[1:-1].tolist()), tuple((k,) for k in devices.tolist()))
        return total, _terms(form, cost.stage_arrays(problem, plan).matrix()).max(), plan

    first = best_under(np.inf)
    if first is None:
        return solve(problem.without_memory_limit(), form)
    least, high, best = first
    best_s, low = least + (M - 1) * high, 0.0
    for _ in range(BISECTIONS):  # a short formula soon
        middle = 0.5 * (low + high)
        found = best_under(middle)
        if found is None:
            low = middle
            continue
        total, high, plan = found
        if total + (M - 1) * high < best_s:
            best, best_s = plan, total + (M - 1) * high
    limit = first[1]
    while True:
        # the sum of any strategy is `least` or more: with a T as large as this its formula is no shorter
        limit = min(limit, (best_s - least) / (M - 1) if M > 1 else 0.0) * STRICTLY
        found = best_under(limit)
        if found is None:
            return best
        least, limit, plan = found
        if least + (M - 1) * limit < best_s:
            best, best_s = plan, least + (M - 1) * limit


@njit(cache=True)
def _tables(p):
    """compute [K, L + 1, L + 1] of layers i .. j - 1 and ahead [K, K, L + 1] of the activation before layer j, in s."""
    L, K = p.output.shape[0], p.memory.shape[0]
    compute, ahead = np.full((K, L + 1, L + 1), np.inf), np.zeros((K, K, L + 1))
    for k in range(K):
        for i in range(L):
            for j in range(i + 1, L + 1):
                compute[k, i, j] = p.forward[j, k] - p.forward[i, k] + (p.backward[j, k] - p.backward[i, k])
        for h in range(K):
            for j in range(1, L):
                if h != k:
                    ahead[k, h, j] = p.latency[k, h] + p.output[j - 1] * p.s_per_byte[k, h]
    return compute, ahead


@njit(cache=True)
def _least_sum(p, compute, ahead, weights, limit, bounds, devices):
    """Least sum C + sum c in s of strategies with all T <= limit, inf where there is none; the strategy is written to
    bounds [S + 1] and devices [S]. An end is known by its devices x, the first of them k, its first layer i and the
    device before it, g, where T counts a transfer over that boundary (else g = 0)."""
    K, L = compute.shape[0], compute.shape[1] - 1
    after_ahead, after_back, before_ahead, before_back = weights
    keyed = before_ahead + before_back > 0.0
    whole = (1 << K) - 1
    value = np.full((whole + 1, K, L + 1, K if keyed else 1), np.inf)
    choice = np.zeros((whole + 1, K, L + 1, K if keyed else 1), np.int32)  # j K + h: what follows
    for x in range(1, whole + 1):
        n = 0
        for k in range(K):
            n += x >> k & 1
        s = K - n
        for k in range(K):
            if not x >> k & 1:
                continue
            y = x ^ (1 << k)
            for i in range(s, L - n + 1 if s > 0 else 1):
                for g in range(K if keyed and s > 0 else 1):
                    if keyed and s > 0 and x >> g & 1:
                        continue
                    enter = 0.0
                    if keyed and s > 0:
                        enter = before_ahead * ahead[g, k, i] + before_back * ahead[k, g, i]
                    least, at = np.inf, 0
                    for j in range(i + 1 if n > 1 else L, L - n + 2):
                        C = compute[k, i, j]
                        used = p.static[j] - p.static[i] + (p.stash[j] - p.stash[i]) * p.in_flight[s]
                        if C + enter > limit or used > p.memory[k]:
                            break  # more layers only take more
                        if n == 1:
                            least = C
                        for h in range(K if n > 1 else 0):
                            if y >> h & 1:
                                go, back = ahead[k, h, j], ahead[h, k, j]
                                total = C + go + back + value[y, h, j, k if keyed else 0]
                                if total < least and C + enter + after_ahead * go + after_back * back <= limit:
                                    least, at = total, j * K + h
                    value[x, k, i, g], choice[x, k, i, g] = least, at
    best, k = np.inf, 0
    for first in range(K):
        if value[whole, first, 0, 0] < best:
            best, k = value[whole, first, 0, 0], first
    x, i, g = whole, 0, 0
    bounds[K] = L
    for s in range(K):
        devices[s], bounds[s] = k, i
        i, following = divmod(choice[x, k, i, g], K)
        x ^= 1 << k
        g, k = k if keyed else 0, following
    return best
