"""All different ways to give devices to stages, for the planners that enumerate them (Metis, brute force).

An assignment is labels [K]: the stage of each device, S for an unused one. Two devices are interchangeable if they have
the same costs and memory and if swapping them leaves the links unchanged; assignments that differ by such swaps alone
are one, and of these the one with ascending labels is listed.
"""

import math

import numpy as np
from numba import njit

from ..problem import Problem


class PlannerLimit(Exception):
    """The problem is beyond the documented size of a planner: one line with the planner, the size and the cap."""


def same_before(problem: Problem) -> np.ndarray:
    """[K] the last device before k that is interchangeable with k, -1 if there is none."""
    K = problem.devices
    same = np.full(K, -1)
    columns = np.vstack([problem.forward_s, problem.backward_s, problem.memory_bytes])
    for k in range(K):
        for other in range(k - 1, -1, -1):
            if (columns[:, k] == columns[:, other]).all() and _swap_keeps_links(problem, k, other):
                same[k] = other
                break
    return same


def _swap_keeps_links(problem, k, other) -> bool:
    swapped = np.arange(problem.devices)
    swapped[[k, other]] = other, k
    return all((links[np.ix_(swapped, swapped)] == links).all()
               for links in (problem.bandwidth_bytes_per_s, problem.latency_s))


def count(same: np.ndarray, S: int, unused: bool) -> int:
    """How many assignments there are with S non-empty stages; `unused`: devices may stay unused."""
    sizes = np.bincount(_class_of(same))

    def free(labels):  # assignments to a set of labels: multisets within each class of devices
        return math.prod(math.comb(int(n) + labels - 1, int(n)) for n in sizes)

    return sum((-1) ** empty * math.comb(S, empty) * free(S - empty + unused) for empty in range(S + 1))


def labels(same: np.ndarray, S: int, unused: bool) -> np.ndarray:
    """[count, K] all assignments, in lexicographic order."""
    out = np.zeros((count(same, S, unused), len(same)), np.int64)
    _fill(same, S, S + unused, out)
    return out


def _class_of(same):
    classes = np.zeros(len(same), np.int64)
    found = 0
    for k, other in enumerate(same):
        classes[k] = found if other < 0 else classes[other]
        found += other < 0
    return classes


@njit(cache=True)
def _fill(same, S, labels_used, out):
    K = len(same)
    current, members = np.full(K, -1), np.zeros(S + 1, np.int64)
    missing = S
    row = k = 0
    while k >= 0:
        if current[k] >= 0:  # take the device out of its stage
            members[current[k]] -= 1
            missing += current[k] < S and members[current[k]] == 0
            current[k] += 1
        else:
            current[k] = current[same[k]] if same[k] >= 0 else 0
        if current[k] >= labels_used:
            current[k] = -1
            k -= 1
            continue
        missing -= current[k] < S and members[current[k]] == 0
        members[current[k]] += 1
        if missing > K - 1 - k:
            continue
        if k < K - 1:
            k += 1
        else:
            out[row] = current
            row += 1


@njit(cache=True)
def read_labels(labels, order, starts):
    """Write the order [K] and starts [S + 1] that `cost` reads; unused devices come last."""
    n = 0
    for s in range(starts.shape[0]):
        starts[s] = n
        for k in range(labels.shape[0]):
            if labels[k] == s:
                order[n] = k
                n += 1
