"""Sets of devices and what a group of them costs: the tables that programs over device subsets read.

Interchangeable devices (equal costs and memory, and swapping them leaves all links unchanged) are one type, and a set
says how many it has of each type: K equal devices have K + 1 sets in place of 2^K. Sets are numbered in mixed radix, so
that what is left of set x without group g has the number x - g.
Symbols: L layers, K devices, S stages, C types, N sets, G groups (the sets that can run a stage).
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from . import cost
from .cost import ALL_REDUCE, BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD
from .problem import Problem


class Sets(NamedTuple):
    """All sets of devices, and those that can be groups: 1 to K - S + 1 devices."""

    members: np.ndarray  # [C, most of one type] devices of each type, -1 where there are fewer
    digits: np.ndarray  # [N, C] how many of each type
    size: np.ndarray  # [N]
    groups: np.ndarray  # [G] the set that each group is
    within: np.ndarray  # the groups contained in each set, one set after the other
    within_start: np.ndarray  # [N + 1] where those of each set start
    above: np.ndarray  # the sets that contain each group, one group after the other
    above_start: np.ndarray  # [G + 1]


class GroupCosts(NamedTuple):
    """What each group needs for layers i .. j - 1, and the least that its transfers take."""

    forward: np.ndarray  # [G, L + 1, L + 1] s
    backward: np.ndarray  # [G, L + 1, L + 1] s
    all_reduce: np.ndarray  # [G, L + 1, L + 1] s
    fits: np.ndarray  # [G, L + 1, L + 1] the most stages, this one and those behind it, with which it keeps to memory
    share_end: np.ndarray  # [G, L + 1, C] least fraction of a micro-batch on a member, over stages that end before j
    share_start: np.ndarray  # [G, L + 1, C] the same over stages that start at i
    output: np.ndarray  # [L + 1] bytes over the boundary before each layer
    partner: np.ndarray  # [N, C, 4] best link of a type to a set: least latency and s per byte there, then back


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


def types(problem: Problem) -> list[list[int]]:
    """The devices of each type."""
    same, found = same_before(problem), {}
    for k, other in enumerate(same.tolist()):
        found[k] = found[other] if other >= 0 else []
        found[k].append(k)
    return [found[k] for k in range(problem.devices) if same[k] < 0]


def count(problem: Problem) -> tuple[int, int, int]:
    """How many sets, groups, and pairs of a set and a group within it (of any size) there are."""
    sizes = [len(members) for members in types(problem)]
    by_size = np.ones(1)
    for n in sizes:
        by_size = np.convolve(by_size, np.ones(n + 1))
    groups = int(by_size[1:problem.devices - problem.stages + 2].sum())
    sets = math.prod(n + 1 for n in sizes)
    return sets, groups, min(math.prod((n + 1) * (n + 2) // 2 for n in sizes), sets * groups)


def make(problem: Problem) -> Sets:
    """The sets of a problem's devices."""
    by_type = types(problem)
    radix = np.array([len(members) + 1 for members in by_type])
    members = np.full((len(by_type), radix.max() - 1), -1)
    for row, some in zip(members, by_type):
        row[:len(some)] = some
    digits = np.arange(radix.prod())[:, None] // np.concatenate([[1], radix.cumprod()[:-1]]) % radix
    size = digits.sum(axis=1)
    groups = np.flatnonzero((size >= 1) & (size <= problem.devices - problem.stages + 1))
    holds = _contained(digits, groups)
    within, above = np.nonzero(holds)[1], np.nonzero(holds.T)[1]
    return Sets(members, digits, size, groups, within, _starts(holds.sum(axis=1)), above, _starts(holds.sum(axis=0)))


def _starts(counts):
    return np.concatenate([[0], np.cumsum(counts)])


@njit(cache=True)
def _contained(digits, groups):
    """[N, G] whether a set contains a group."""
    holds = np.ones((digits.shape[0], groups.shape[0]), np.bool_)
    for x in range(digits.shape[0]):
        for g in range(groups.shape[0]):
            for c in range(digits.shape[1]):
                if digits[groups[g], c] > digits[x, c]:
                    holds[x, g] = False
                    break
    return holds


@njit(cache=True)
def place(sets, g, skip, order, position):
    """Write the devices of group g to order from `position`, past as many of each type as set `skip` has; returns the
    position behind them, -1 where there are too few."""
    for c in range(sets.digits.shape[1]):
        first = sets.digits[skip, c]
        for n in range(first, first + sets.digits[sets.groups[g], c]):
            if n >= sets.members.shape[1] or sets.members[c, n] < 0:
                return -1
            order[position] = sets.members[c, n]
            position += 1
    return position


@njit(cache=True)
def group_costs(p, sets):
    """The tables of all groups; p is a packed problem."""
    L, K, S = p.output.shape[0], p.memory.shape[0], p.in_flight.shape[0]
    G, C = sets.groups.shape[0], sets.digits.shape[1]
    forward, backward = np.zeros((G, L + 1, L + 1)), np.zeros((G, L + 1, L + 1))
    all_reduce, fits = np.zeros((G, L + 1, L + 1)), np.zeros((G, L + 1, L + 1), np.int16)
    share_end, share_start = np.ones((G, L + 1, C)), np.ones((G, L + 1, C))
    order, bounds, starts = np.zeros(K, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64)
    out, used, share = np.zeros((5, 1)), np.zeros(K), np.zeros(K)
    for g in range(G):
        starts[1] = place(sets, g, 0, order, 0)
        for i in range(L):
            for j in range(i + 1, L + 1):
                bounds[0], bounds[1] = i, j
                cost.fill_stage(p, bounds, order, starts, 0, out, used, share)
                forward[g, i, j], backward[g, i, j] = out[FORWARD, 0], out[BACKWARD, 0]
                all_reduce[g, i, j] = out[ALL_REDUCE, 0]
                n = 0
                while n < S and _has_room(p, S - 1 - n, i, j, order, starts[1], share):
                    n += 1
                fits[g, i, j] = n
                first = 0
                for c in range(C):
                    if sets.digits[sets.groups[g], c]:
                        share_end[g, j, c] = min(share_end[g, j, c], share[first])
                        share_start[g, i, c] = min(share_start[g, i, c], share[first])
                        first += sets.digits[sets.groups[g], c]
    output = np.zeros(L + 1)
    output[1:] = p.output
    return GroupCosts(forward, backward, all_reduce, fits, share_end, share_start, output, _partners(p, sets))


@njit(cache=True)
def _has_room(p, s, i, j, order, n, share):
    static = p.static[j] - p.static[i]
    stash = (p.stash[j] - p.stash[i]) * p.in_flight[s]
    for a in range(n):
        if static + share[a] * stash > p.memory[order[a]]:
            return False
    return True


@njit(cache=True)
def _partners(p, sets):
    N, C = sets.digits.shape
    partner = np.full((N, C, 4), np.inf)
    for x in range(N):
        for c in range(C):
            for d in range(C):
                k, other = sets.members[c, 0], 0
                if c == d:  # a second device of the type
                    other = min(1, sets.members.shape[1] - 1)
                h = sets.members[d, other]
                if sets.digits[x, d] and h >= 0 and h != k:
                    partner[x, c, 0] = min(partner[x, c, 0], p.latency[k, h])
                    partner[x, c, 1] = min(partner[x, c, 1], p.s_per_byte[k, h])
                    partner[x, c, 2] = min(partner[x, c, 2], p.latency[h, k])
                    partner[x, c, 3] = min(partner[x, c, 3], p.s_per_byte[h, k])
    return partner


@njit(cache=True)
def least_transfers(t, sets, g, x, share, size):
    """The least that both transfers between group g and any group within set x take, s (from g, to g): each member of
    g moves its part of the bytes over no better than its best link."""
    ahead = back = 0.0
    for c in range(share.shape[0]):
        if sets.digits[sets.groups[g], c]:
            ahead = max(ahead, t.partner[x, c, 0] + share[c] * size * t.partner[x, c, 1])
            back = max(back, t.partner[x, c, 2] + share[c] * size * t.partner[x, c, 3])
    return ahead, back


@njit(cache=True)
def group_links(p, sets, t):
    """[G, G, L + 1, 2] the least that the transfers from one group to the next over the boundary before layer j take, s
    (there, back): at the least shares of both, so exact where shares do not depend on the layers."""
    L, K, G, C = p.output.shape[0], p.memory.shape[0], sets.groups.shape[0], sets.digits.shape[1]
    link = np.full((G, G, L + 1, 2), np.inf)
    bounds, order, starts = np.zeros(3, np.int64), np.zeros(K, np.int64), np.zeros(3, np.int64)
    out, share = np.zeros((5, 2)), np.zeros(K)
    for g in range(G):
        starts[1] = place(sets, g, 0, order, 0)
        for h in range(G):
            starts[2] = place(sets, h, sets.groups[g], order, starts[1])
            if starts[2] < 0:
                continue
            for j in range(1, L):
                n = 0
                for c in range(C):
                    for _ in range(sets.digits[sets.groups[g], c]):
                        share[n] = t.share_end[g, j, c]
                        n += 1
                for c in range(C):
                    for _ in range(sets.digits[sets.groups[h], c]):
                        share[n] = t.share_start[h, j, c]
                        n += 1
                bounds[1] = j
                cost.fill_sends(p, bounds, order, starts, 0, out, share)
                link[g, h, j, 0], link[g, h, j, 1] = out[SEND_FORWARD, 0], out[SEND_BACKWARD, 0]
    return link
