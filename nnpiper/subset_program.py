"""A dynamic program over subsets of devices: which ends of pipelines can be part of a strategy below a limit.

It builds pipelines from the last stage on. An end is known by how many stages n it has, the devices x that these use,
the first group g of them, its first layer i, and the group before it where that one's transfers count (keyed); or by n,
x and i alone, with the best links that there are, where the keys would be too many. An end has labels
(critical_path.py): one that is no less than another in all its numbers is dropped, and two may be replaced by their
minimum, so that they stay few. What a start takes at least, and with that the limit, decides which ends are kept.

Bound: the least value of a label of a whole pipeline is no more than the step of any strategy, as a strategy's own
label is dropped only for one that is no more. Only the shares of a group's members in transfers are taken at their
least over the layers, which changes nothing where devices differ by a factor. Symbols as in device_sets.py.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from . import cost, device_sets
from .critical_path import extend, label_parts, own_paths, value
from .device_sets import GroupCosts, Sets, least_transfers
from .problem import Problem

MAX_COSTS = 9e6  # entries in a table of group costs
GIVEN_UP = -1.0  # as a value
LABELS = 4  # of an end that is keyed; 1 where it is not: the links that it leaves open cost more than labels can save


class Program(NamedTuple):
    """What the compiled program reads of a problem."""

    sets: Sets
    costs: GroupCosts
    link: np.ndarray  # [G, G, L + 1, 2] s, or empty: ends are not keyed
    stages: int
    micro_batches: int
    one_f_one_b: bool
    blocking: bool


class Ends(NamedTuple):
    """The labels of all ends that can still be part of a pipeline below the limit."""

    table: np.ndarray  # slot + 1 by hash of the key, 0: free
    key: np.ndarray  # [slots]
    count: np.ndarray  # [slots] labels in use
    labels: np.ndarray  # [slots, 4 or 1, numbers of a label]


def build(problem: Problem, most_keys: float, most_pairs: float) -> Program | None:
    """The program of a problem, None where it would be too large. most_keys: entries in its table of starts (16 bytes
    each), beyond which ends are not keyed; most_pairs: pairs of a set and a group within it times pairs of layers,
    where they are not."""
    L, K, S = problem.layers, problem.devices, problem.stages
    N, G, pairs = device_sets.count(problem)
    if G * (L + 1) ** 2 > MAX_COSTS:
        return None
    keyed = N * G * (L + 1) * (1 if S == K else S) <= most_keys
    if not keyed and pairs * L**2 > most_pairs:
        return None
    p, sets = cost.pack(problem), device_sets.make(problem)
    costs = device_sets.group_costs(p, sets)
    link = device_sets.group_links(p, sets, costs) if keyed else np.zeros((0, 0, 0, 0))
    return Program(sets, costs, link, S, problem.micro_batches, problem.schedule == "1f1b",
                   problem.transfers == "blocking")


@njit(cache=True)
def insert(labels, count, new, weight):
    """Add a label to the `count` of an end, none of which is better than another in all parts; returns the new count.
    Where there is no room it is merged into the nearest."""
    kept, parts = 0, new.shape[0]
    for a in range(count):
        old_better = new_better = True
        for x in range(parts):
            old_better = old_better and labels[a, x] <= new[x]
            new_better = new_better and labels[a, x] >= new[x]
        if old_better:  # then none was dropped: it would be better than this one
            return count
        if not new_better:
            for x in range(parts):
                labels[kept, x] = labels[a, x]
            kept += 1
    if kept < labels.shape[0]:
        for x in range(parts):
            labels[kept, x] = new[x]
        return kept + 1
    nearest, least = 0, np.inf
    for a in range(kept):
        distance = 0.0
        for x in range(parts):
            distance += weight[x] * abs(labels[a, x] - new[x])
        if distance < least:
            nearest, least = a, distance
    for x in range(parts):
        labels[nearest, x] = min(labels[nearest, x], new[x])
    return kept


@njit(cache=True)
def end_key(q, n, x, g, before, i):
    """The number of an end; g and before are -1 where they are no part of its key."""
    if q.link.shape[0] == 0:
        g = -1
    if q.link.shape[0] == 0 or not q.blocking:
        before = -1
    G = q.sets.groups.shape[0] + 1
    return (((n * q.sets.size.shape[0] + x) * G + g + 1) * G + before + 1) * q.costs.output.shape[0] + i


@njit(cache=True)
def find(ends, key):
    """The slot of a key, or -1 - its place in the table where it has none."""
    mask = ends.table.shape[0] - 1
    position = np.int64((np.uint64(key) * np.uint64(11400714819323198485)) >> np.uint64(20)) & mask
    while ends.table[position] > 0:
        if ends.key[ends.table[position] - 1] == key:
            return np.int64(ends.table[position] - 1)
        position = (position + 1) & mask
    return -1 - position


@njit(cache=True)
def _empty(slots, labels, parts):
    return Ends(np.zeros(4 * slots, np.int32), np.zeros(slots, np.int64), np.zeros(slots, np.int8),
                np.zeros((slots, labels, parts)))


@njit(cache=True)
def _grown(ends):
    """Twice the slots."""
    used = ends.key.shape[0]
    new = _empty(2 * used, ends.labels.shape[1], ends.labels.shape[2])
    new.key[:used], new.count[:used], new.labels[:used] = ends.key, ends.count, ends.labels
    for slot in range(used):
        new.table[-1 - find(new, new.key[slot])] = slot + 1
    return new


@njit(cache=True)
def _load(ends, key, labels):
    """Copy the labels that an end has so far; returns how many."""
    slot = find(ends, key)
    count = ends.count[slot] if slot >= 0 else 0
    for a in range(count):
        for x in range(labels.shape[1]):
            labels[a, x] = ends.labels[slot, a, x]
    return count


@njit(cache=True)
def _store(ends, used, key, labels, count):
    """Set the labels of an end; returns the ends, which may have grown, and how many slots are in use."""
    slot = find(ends, key)
    if slot < 0 and used == ends.key.shape[0]:
        ends = _grown(ends)
        slot = find(ends, key)
    if slot < 0:
        ends.table[-1 - slot] = used + 1
        ends.key[used] = key
        slot = used
        used += 1
    ends.count[slot] = count
    for a in range(count):
        for x in range(labels.shape[1]):
            ends.labels[slot, a, x] = labels[a, x]
    return ends, used


@njit(cache=True)
def _sums(q, limit, from_end, ends):
    """Least sums over the pipelines that start (from_end: end) with s + 1 stages: of F, B and both transfers, but those
    over the boundary that is still open where keyed.

    Returns [S or 1, N, G or 1, L + 1] by s (one row where the size of the set says it), the set of devices that may be
    used, the stage's group at the open boundary where keyed, and the number of layers. Stages whose own paths reach the
    limit are left out. For the starts, `ends` is the result for the ends.
    """
    sets, t = q.sets, q.costs
    N, L, S, M, G = sets.size.shape[0], t.output.shape[0] - 1, q.stages, q.micro_batches, sets.groups.shape[0]
    whole, keyed = N - 1, q.link.shape[0] > 0
    rows = 1 if S == sets.size[whole] else S  # with all devices used, the size of a set says how many stages
    least = np.full((rows, N, G if keyed else 1, L + 1), np.inf)
    away = np.zeros(L + 1)  # R(s) - F - B at least
    for s in range(S - 1):
        n = s + 1 if from_end else S - s
        row, row_before, row_rest = (0, 0, 0) if rows == 1 else (s, s - 1, S - 2 - s)
        for g in range(G):
            single = sets.size[sets.groups[g]] == 1
            for a in range(sets.above_start[g], sets.above_start[g + 1]):
                x = sets.above[a]
                y, z = x - sets.groups[g], whole - x
                if sets.size[y] < s or sets.size[z] < S - 1 - s or (rows == 1 and sets.size[y] > s):
                    continue
                target = least[row, x, g if keyed else 0]
                if not from_end:
                    for j in range(s + 1, L - S + s + 2):
                        away[j] = _away(q, ends[row_rest, z], g, z, j)
                first, last = sets.within_start[y], sets.within_start[y + 1]
                if s == 0 or not keyed:
                    first, last = 0, 1
                for e in range(first, last):
                    before = sets.within[e] if keyed else 0
                    for i in range(s, (0 if s == 0 else L - S + s) + 1):
                        base = ahead = back = 0.0
                        if s > 0:
                            base = least[row_before, y, before, i]
                            if base == np.inf:
                                continue
                            if from_end:
                                ahead, back = transfers_behind(q, g, y, before, L - i)
                            else:
                                ahead, back = _transfers_before(q, g, y, before, i)
                            base += ahead + back
                        for j in range(i + 1, L - S + s + 2):
                            lo, hi = (L - j, L - i) if from_end else (i, j)
                            F, B = t.forward[g, lo, hi], t.backward[g, lo, hi]
                            sum_ = base + F + B
                            if sum_ >= target[j]:
                                continue
                            head, rest = (0.0, base) if from_end else (base, away[j])
                            if head + F + B + rest >= limit:
                                continue
                            if q.blocking and from_end:
                                F, rest = F + ahead, rest - ahead
                            elif q.blocking:
                                B, head = B + back, head - back
                            around = F + B + rest
                            own = around + (M - 1) * (F + B)
                            if q.one_f_one_b:
                                own = own_paths(F, B, around, 0.0, n, M, 0.0, 0.0)[0]
                            if head + own >= limit:
                                if single and head + M * (F + B) >= limit:
                                    break  # on one device, more layers only take more
                            elif t.fits[g, lo, hi] >= n:
                                target[j] = min(target[j], sum_)
        if rows > 1:  # a device may stay unused
            stride = 1
            for c in range(sets.digits.shape[1]):
                for x in range(N):
                    for h in range(least.shape[2] if sets.digits[x, c] else 0):
                        for j in range(L + 1):
                            least[row, x, h, j] = min(least[row, x, h, j], least[row, x - stride, h, j])
                stride *= sets.digits[whole, c] + 1
    return least


@njit(cache=True)
def _away(q, ends, g, z, j):
    """The least of R(s) - F - B where group g has stage s, layer j is next, and set z is left; ends [G or 1, L + 1]."""
    L, sets = q.costs.output.shape[0] - 1, q.sets
    if q.link.shape[0] == 0:
        return ends[0, L - j]
    least = np.inf
    for e in range(sets.within_start[z], sets.within_start[z + 1]):
        h = sets.within[e]
        c = q.link[g, h, j, 1] + (0.0 if q.blocking else q.link[g, h, j, 0])
        least = min(least, ends[h, L - j] + c)
    return least


@njit(cache=True)
def transfers_behind(q, g, y, after, j):
    """Both transfers at least over the boundary before layer j, from group g to one within set y (keyed: `after`)."""
    if q.link.shape[0] > 0:
        return q.link[g, after, j, 0], q.link[g, after, j, 1]
    return least_transfers(q.costs, q.sets, g, y, q.costs.share_end[g, j], q.costs.output[j])


@njit(cache=True)
def _transfers_before(q, g, y, before, i):
    """Both transfers at least over the boundary before layer i, to group g from one within set y (keyed: `before`)."""
    if q.link.shape[0] > 0:
        return q.link[before, g, i, 0], q.link[before, g, i, 1]
    back, ahead = least_transfers(q.costs, q.sets, g, y, q.costs.share_start[g, i], q.costs.output[i])
    return ahead, back


@njit(cache=True)
def least_starts(q, limit):
    """The table of `_sums` for the starts: what comes before an end at least."""
    return _sums(q, limit, False, _sums(q, limit, True, np.zeros((1, 1, 1, 1))))


@njit(cache=True)
def feasible(q):
    """Whether any strategy keeps to memory."""
    sets, t, S, L = q.sets, q.costs, q.stages, q.costs.output.shape[0] - 1
    ends = _sums(q, np.inf, True, np.zeros((1, 1, 1, 1)))
    whole = sets.size.shape[0] - 1
    for g in range(sets.groups.shape[0]):
        for j in range(L if S == 1 else 1, L + 1 if S == 1 else L - S + 2):
            z = whole - sets.groups[g]
            if t.fits[g, 0, j] >= S and (S == 1 or sets.size[z] >= S - 1
                                         and _away(q, ends[ends.shape[0] - 2, z], g, z, j) < np.inf):
                return True
    return False


@njit(cache=True)
def solve(q, limit, most_work):
    """The ends of all pipelines whose paths are below the limit, and the least value of a whole pipeline, inf where
    there is none. GIVEN_UP says that it took more than most_work steps (of some 50 ns)."""
    sets, t = q.sets, q.costs
    L, S, M, G = t.output.shape[0] - 1, q.stages, q.micro_batches, sets.groups.shape[0]
    whole = sets.size.shape[0] - 1
    K, keyed, parts = sets.size[whole], q.link.shape[0] > 0, label_parts(q.blocking, q.one_f_one_b)
    starts = least_starts(q, limit)
    weight = np.ones(parts)
    if not q.one_f_one_b:
        weight[1] = weight[3] = M - 1.0
    room = LABELS if keyed else 1
    ends, used, work = _empty(1024, room, parts), 0, 0
    following, following_link = np.zeros((G * L + 1, 2), np.int64), np.zeros((G * L + 1, 2))
    alive, alive_cost = np.zeros((room * (G * L + 1), 3), np.int64), np.zeros((room * (G * L + 1), 4))
    before, before_cost = np.full(G, -1), np.zeros((G, 2))
    labels, label, none = np.zeros((room, parts)), np.zeros(parts), np.zeros(parts)
    best = np.inf
    for n in range(1, S + 1):
        s = S - n
        for g in range(G):
            for a in range(sets.above_start[g], sets.above_start[g + 1]):
                x = sets.above[a]
                y = x - sets.groups[g]
                if sets.size[y] < n - 1 or K - sets.size[x] < s or (n == 1 and y > 0):
                    continue
                nexts = _following(q, ends, n, g, y, following, following_link)
                for i in range(s, (0 if s == 0 else L - n) + 1 if nexts else s):
                    befores = _before(q, starts, n, g, x, i, limit, before, before_cost)
                    if befores == 0:
                        continue
                    work += nexts
                    if work > most_work:
                        return ends, GIVEN_UP
                    head = back_in = np.inf
                    for b in range(befores):
                        head, back_in = min(head, before_cost[b, 0]), min(back_in, before_cost[b, 1])
                    count = 0  # of labels that what comes before could be put to
                    for e in range(nexts):
                        j, slot = following[e, 0], following[e, 1]
                        if j <= i or t.fits[g, i, j] < n:
                            continue
                        F, B = t.forward[g, i, j], t.backward[g, i, j]
                        ahead, back = following_link[e, 0], following_link[e, 1]
                        if q.blocking:
                            F, ahead, back = F + ahead, 0.0, 0.0
                        if head + M * (F + B + back_in) >= limit:
                            continue
                        for b in range(1 if n == 1 else ends.count[slot]):
                            rest = none if n == 1 else ends.labels[slot, b]
                            if q.one_f_one_b and head + F + B + back_in + ahead + back + rest[1] >= limit:
                                continue
                            v = extend(rest, F, B + back_in, ahead, back, t.all_reduce[g, i, j], n, M,
                                       q.one_f_one_b, label)
                            if head + v < limit and value(label, M, q.one_f_one_b) < limit:
                                alive[count, 0], alive[count, 1], alive[count, 2] = slot, b, j
                                alive_cost[count, 0], alive_cost[count, 1] = F, B
                                alive_cost[count, 2], alive_cost[count, 3] = ahead, back
                                count += 1
                    for b in range(befores if count else 0):
                        work += count
                        key = end_key(q, n, x, g, before[b], i)
                        filled = _load(ends, key, labels)  # ends that are not keyed can start with another group
                        for e in range(count):
                            slot, which, j = alive[e, 0], alive[e, 1], alive[e, 2]
                            v = extend(none if n == 1 else ends.labels[slot, which], alive_cost[e, 0],
                                       alive_cost[e, 1] + before_cost[b, 1], alive_cost[e, 2], alive_cost[e, 3],
                                       t.all_reduce[g, i, j], n, M, q.one_f_one_b, label)
                            if before_cost[b, 0] + v < limit and value(label, M, q.one_f_one_b) < limit:
                                filled = insert(labels, filled, label, weight)
                                if s == 0:
                                    best = min(best, value(label, M, q.one_f_one_b))
                        if filled:
                            ends, used = _store(ends, used, key, labels, filled)
    return ends, best


@njit(cache=True)
def _following(q, ends, n, g, y, following, link):
    """What can follow group g with n - 1 stages on set y: (first layer, slot) and both transfers at least. Returns how
    many."""
    L, S, sets = q.costs.output.shape[0] - 1, q.stages, q.sets
    if n == 1:
        following[0, 0], link[0, 0], link[0, 1] = L, 0.0, 0.0
        return 1
    count = 0
    first, last = sets.within_start[y], sets.within_start[y + 1]
    if q.link.shape[0] == 0:
        first, last = 0, 1
    for j in range(S - n + 1, L - n + 2):
        for b in range(first, last):
            h = sets.within[b]
            slot = find(ends, end_key(q, n - 1, y, h, g, j))
            if slot >= 0:
                following[count, 0], following[count, 1] = j, slot
                link[count, 0], link[count, 1] = transfers_behind(q, g, y, h, j)
                count += 1
    return count


@njit(cache=True)
def _before(q, starts, n, g, x, i, limit, before, cost_):
    """What can come before the end of set x that starts with group g at layer i: the group of the stage before, -1
    where it is no part of the end's key; the least head; the gradient's transfer back to it that makes g busy. Returns
    how many."""
    sets, S = q.sets, q.stages
    z = sets.size.shape[0] - 1 - x
    if n == S:
        before[0], cost_[0, 0], cost_[0, 1] = -1, 0.0, 0.0
        return 1
    row = 0 if starts.shape[0] == 1 else S - n - 1
    first, last = sets.within_start[z], sets.within_start[z + 1]
    if q.link.shape[0] == 0:
        first, last = 0, 1
    count, least = 0, np.inf
    for b in range(first, last):
        h = sets.within[b] if q.link.shape[0] > 0 else 0
        if starts[row, z, h, i] >= limit:
            continue
        ahead, back = _transfers_before(q, g, z, h, i)
        if q.blocking:
            before[count], cost_[count, 0], cost_[count, 1] = h, starts[row, z, h, i] + ahead, back
            count += 1
        else:
            least = min(least, starts[row, z, h, i] + ahead + back)
    if least < np.inf:
        before[0], cost_[0, 0], cost_[0, 1] = -1, least, 0.0
        count = 1
    return count
