"""The moves of the local search: a random neighbour of a state, written in place.

A state is a strategy as `cost.encode` writes it (bounds, order, starts). Layers go from one stage to another, devices
change places, join another group or are left unused, stages change places, or two become one and another two. Many
moves start at the stage that is busy longest, where one most likely helps. Symbols: K devices, S stages.
"""

import numpy as np
from numba import njit

from .xorshift import pick, uniform

# How often a device that is to join others is the better linked one of two; 0, 0.5 and 1 were tried
NEARER = 0.7
# How often, in place of a device that joins another group, two stages become one and another two; 0, 0.05, 0.15 and 0.4
# were tried
SPLIT = 0.1


@njit(cache=True, error_model="numpy")
def move(bounds, order, starts, new_bounds, new_order, new_starts, slowest, random, plan, speed, far, most):
    """Write one random neighbour of the state; the new arrays equal the old ones on entry. far [K, K]: seconds a byte
    between devices. False: no move made."""
    S, K = starts.shape[0] - 1, order.shape[0]
    kind = uniform(random)
    if S > 1 and kind < 0.3:
        return _move_layers(bounds, new_bounds, slowest, random)
    if kind < 0.53:
        # two devices change places, one of them possibly unused; layers may go where the faster one goes
        i, j = pick(random, K), pick(random, K)
        if uniform(random) < 0.3:
            s = pick(random, S) if uniform(random) < 0.5 else slowest
            i = starts[s] + pick(random, starts[s + 1] - starts[s])
        a = _stage_of(starts, i)
        if a < S and starts[a + 1] - starts[a] > 1 and uniform(random) < NEARER:
            mate = starts[a] + pick(random, starts[a + 1] - starts[a])
            mate = mate if mate != i else starts[a] if i > starts[a] else i + 1
            j = _nearer(order, starts[a], starts[a + 1], j, pick(random, K), order[mate], far)
        b = _stage_of(starts, j)
        if a == b:
            return False
        new_order[i], new_order[j] = order[j], order[i]
        if a < S and b < S and uniform(random) < 0.5:
            gain = speed[order[j]] - speed[order[i]]
            giver, taker = (b, a) if gain > 0.0 else (a, b)
            _move_share(bounds, order, starts, new_bounds, giver, giver, taker, abs(gain), speed, random)
        return True
    if K > S and kind < 0.75:
        if S > 2 and uniform(random) < SPLIT:
            return _split(bounds, order, starts, new_bounds, new_order, new_starts, random, speed)
        return _move_device(bounds, order, starts, new_bounds, new_order, new_starts, slowest, random, speed, far,
                            most)
    if S == 1:
        return False
    # stages change places and keep their devices and layer counts: two of them, one moved, or a run reversed
    i, j = pick(random, S), pick(random, S)
    if i == j:
        return False
    low, high = min(i, j), max(i, j)
    for s in range(S):
        plan[s] = s
    if kind < 0.83:
        plan[i], plan[j] = j, i
    elif kind < 0.91:
        for s in range(low, high + 1):
            plan[s] = low + high - s
    elif i < j:
        for s in range(i, j):
            plan[s] = s + 1
        plan[j] = i
    else:
        for s in range(j + 1, i + 1):
            plan[s] = s - 1
        plan[j] = i
    position = starts[low]
    for s in range(low, high + 1):
        old = plan[s]
        new_bounds[s + 1] = new_bounds[s] + bounds[old + 1] - bounds[old]
        for k in range(starts[old], starts[old + 1]):
            new_order[position] = order[k]
            position += 1
        new_starts[s + 1] = position
    return True


@njit(cache=True, error_model="numpy")
def _move_layers(bounds, new_bounds, slowest, random):
    """One or a few layers go from one stage to another."""
    S = bounds.shape[0] - 1
    giver = slowest if uniform(random) < 0.5 else pick(random, S)
    if uniform(random) < 0.5:
        taker = giver + 1 if (uniform(random) < 0.5 and giver < S - 1) or giver == 0 else giver - 1
    else:
        taker = pick(random, S)
    spare = bounds[giver + 1] - bounds[giver] - 1
    if giver == taker or spare < 1:
        return False
    count = 1
    while count < spare and uniform(random) < 0.3:
        count += 1
    _shift(new_bounds, giver, taker, count)
    return True


@njit(cache=True, error_model="numpy")
def _move_share(bounds, order, starts, new_bounds, measure, giver, taker, part, speed, random):
    """Layers go from one stage to another: the part of stage `measure`'s that `part` is of its summed speed."""
    whole = _summed(speed, order, starts[measure], starts[measure + 1])
    count = int(min((bounds[measure + 1] - bounds[measure]) * part / whole, 1e6) + uniform(random))
    _shift(new_bounds, giver, taker, min(count, bounds[giver + 1] - bounds[giver] - 1))


@njit(cache=True, error_model="numpy")
def _summed(speed, order, first, last):
    """Speed of the devices at these positions together."""
    total = 0.0
    for i in range(first, last):
        total += speed[order[i]]
    return total


@njit(cache=True, error_model="numpy")
def _shift(new_bounds, giver, taker, count):
    """The stages between keep their counts."""
    for s in range(giver + 1, taker + 1):
        new_bounds[s] -= count
    for s in range(taker + 1, giver + 1):
        new_bounds[s] += count


@njit(cache=True, error_model="numpy")
def _stage_of(starts, position):
    S = starts.shape[0] - 1
    for s in range(S):
        if position < starts[s + 1]:
            return s
    return S


@njit(cache=True, error_model="numpy")
def _nearer(order, first, last, i, j, device, far):
    """Which of two positions has the device with the better link to this one; one outside the group first <= . < last,
    if there is one."""
    if first <= i < last:
        return j
    if first <= j < last:
        return i
    return j if far[device, order[j]] < far[device, order[i]] else i


@njit(cache=True, error_model="numpy")
def _move_device(bounds, order, starts, new_bounds, new_order, new_starts, slowest, random, speed, far, most):
    """One device joins another group or is left unused, alone or with its part of the layers; a group keeps at least
    one device."""
    S, K = starts.shape[0] - 1, order.shape[0]
    i = pick(random, K)
    target = slowest if uniform(random) < 0.3 else pick(random, S + 1)
    if target < S and uniform(random) < NEARER:
        first, last = starts[target], starts[target + 1]
        i = _nearer(order, first, last, i, pick(random, K), order[first + pick(random, last - first)], far)
    source = _stage_of(starts, i)
    if source < S and starts[source + 1] - starts[source] == 1:
        return False
    if target == source or (source == S and starts[S] >= most):
        return False
    device = order[i]
    if S > 1 and uniform(random) < 0.6:
        measure = source if source < S else target
        giver = source if source < S else slowest if slowest != target else pick(random, S)
        taker = target if target < S else pick(random, S)
        _move_share(bounds, order, starts, new_bounds, measure, giver, taker, speed[device], speed, random)
    if source < target:
        end = starts[target] if target < S else K  # first position of the target once the device is gone, plus one
        for x in range(i, end - 1):
            new_order[x] = order[x + 1]
        new_order[end - 1] = device
        for s in range(source + 1, target + 1):
            new_starts[s] -= 1
    else:
        begin = starts[target + 1]
        for x in range(i, begin, -1):
            new_order[x] = order[x - 1]
        new_order[begin] = device
        for s in range(target + 1, min(source, S) + 1):
            new_starts[s] += 1
    return True


@njit(cache=True, error_model="numpy")
def _split(bounds, order, starts, new_bounds, new_order, new_starts, random, speed):
    """Two neighbouring stages become one, and another becomes two: one device or several, drawn at random, go ahead of
    the others or stay behind, with the layers that are due to their speed."""
    S = starts.shape[0] - 1
    joined, split = pick(random, S - 1), pick(random, S)
    first, last, layers = starts[split], starts[split + 1], bounds[split + 1] - bounds[split]
    if split == joined or split == joined + 1 or last - first < 2 or layers < 2:
        return False
    ahead = 1 if uniform(random) < 0.5 else 1 + pick(random, last - first - 1)
    ahead = ahead if uniform(random) < 0.5 else last - first - ahead
    for i in range(first, first + ahead):
        j = i + pick(random, last - i)
        new_order[i], new_order[j] = new_order[j], new_order[i]
    part, whole = _summed(speed, new_order, first, first + ahead), _summed(speed, new_order, first, last)
    given = min(max(int(layers * part / whole + uniform(random)), 1), layers - 1)
    end = 1
    for s in range(S):  # all boundaries but that within the joined stages, and one more within the split one
        if s == split:
            new_bounds[end], new_starts[end] = bounds[s] + given, first + ahead
            end += 1
        if s != joined:
            new_bounds[end], new_starts[end] = bounds[s + 1], starts[s + 1]
            end += 1
    return True
