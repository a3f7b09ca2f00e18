"""All different ways to give devices to stages, for planners that enumerate them (Metis).

An assignment is labels [K]: the stage of each device; all devices are used. Assignments that differ by swaps of
interchangeable devices (`device_sets.same_before`) alone are one, and of these the one with ascending labels is listed.
"""

import math

import numpy as np
from numba import njit


class PlannerLimit(Exception):
    """The problem is beyond the documented size of a planner: one line with the planner, the size and the cap."""


def count(same: np.ndarray, S: int) -> int:
    """How many assignments there are with S non-empty stages."""
    sizes = np.bincount(_class_of(same))

    def free(labels):  # assignments to a set of labels: multisets within each class of devices
        return math.prod(math.comb(int(n) + labels - 1, int(n)) for n in sizes)

    return sum((-1) ** empty * math.comb(S, empty) * free(S - empty) for empty in range(S + 1))


def labels(same: np.ndarray, S: int) -> np.ndarray:
    """[count, K] all assignments, in lexicographic order."""
    out = np.zeros((count(same, S), len(same)), np.int64)
    _fill(same, S, out)
    return out


def _class_of(same):
    classes = np.zeros(len(same), np.int64)
    found = 0
    for k, other in enumerate(same):
        classes[k] = found if other < 0 else classes[other]
        found += other < 0
    return classes


@njit(cache=True)
def _fill(same, S, out):
    K = len(same)
    current, members = np.full(K, -1), np.zeros(S, np.int64)
    missing = S
    row = k = 0
    while k >= 0:
        if current[k] >= 0:  # take the device out of its stage
            members[current[k]] -= 1
            missing += members[current[k]] == 0
            current[k] += 1
        else:
            current[k] = current[same[k]] if same[k] >= 0 else 0
        if current[k] >= S:
            current[k] = -1
            k -= 1
            continue
        missing -= members[current[k]] == 0
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
    """Write the order [K] and starts [S + 1] that `cost` reads."""
    n = 0
    for s in range(starts.shape[0]):
        starts[s] = n
        for k in range(labels.shape[0]):
            if labels[k] == s:
                order[n] = k
                n += 1
