"""What the network reads while it builds a strategy: of the partial strategy at each step of the pointer, and of the
chosen stages. Compiled, since no gradient flows through it; drawing and scoring use the same functions.

Symbols: A problems, N strategies each, K devices, S stages, P places in the work (`features.PLACES`).
"""

import math

import numpy as np
from numba import njit

STATE_FEATURES, STAGE_FEATURES = 11, 19


@njit(cache=True)
def output_at(outputs, part):
    """log (output / mean) at the cut nearest to a part of the work; outputs [P + 1]."""
    last = outputs.shape[0] - 1
    return outputs[min(max(int(part * last + 0.5), 0), last)]


@njit(cache=True)
def read_state(used, group, opened, S, speed, outputs, values):
    """One partial strategy into values [STATE_FEATURES]; used, group [K] bool, opened stages, speed [K] shares."""
    K = speed.shape[0]
    left = size = 0
    free_speed = group_speed = 0.0
    for k in range(K):
        if not used[k]:
            left += 1
            free_speed += speed[k]
        if group[k]:
            size += 1
            group_speed += speed[k]
    to_open = S - opened
    fair = free_speed / max(to_open, 1)
    values[0] = to_open / S
    values[1] = left / K
    values[2] = free_speed
    values[3] = group_speed * S
    values[4] = math.log(max(group_speed * S, 0.01))
    values[5] = size / K
    values[6] = to_open / max(left, 1)
    values[7] = fair * S
    values[8] = 1.0 if to_open == 0 else 0.0
    values[9] = 0.5 * output_at(outputs, 1.0 - free_speed)  # where the open stage ends
    values[10] = 0.5 * output_at(outputs, 1.0 - free_speed + fair)


@njit(cache=True)
def read_states(used, group, opened, S, speed, outputs):
    """[A, N, STATE_FEATURES] of partial strategies [A, N, ...]."""
    A, N, K = used.shape
    values = np.empty((A, N, STATE_FEATURES), np.float32)
    for a in range(A):
        for n in range(N):
            read_state(used[a, n], group[a, n], opened[a, n], S, speed[a], outputs[a], values[a, n])
    return values


@njit(cache=True)
def _ratio(time):
    """0 for nothing, 1 at the stage time's size, growing with the logarithm."""
    return math.log(1.0 + 20.0 * time) / 3.0


@njit(cache=True)
def read_stages(order, starts, speed, link, link_reduce, capacity, flight, outputs, share, values):
    """The stages of one strategy (order [K], starts [S + 1]) into share [S], each stage's part of the summed speed, and
    values [S, STAGE_FEATURES]; the other arguments are one problem's part of `features.Features`."""
    S, K = share.shape[0], speed.shape[0]
    total = 0.0
    for s in range(S):
        share[s] = 0.0
        for i in range(starts[s], starts[s + 1]):
            share[s] += speed[order[i]]
        share[s] = max(share[s], 1e-6)
        total += share[s]
    done = ahead_before = back_before = output_before = 0.0
    for s in range(S):
        first, last, end = starts[s], starts[s + 1], starts[s + 2] if s + 1 < S else starts[s + 1]
        own = share[s]
        done += own / total
        ahead = back = output = slope = 0.0
        if s + 1 < S:
            # the busiest sender and the busiest receiver, in both directions
            for i in range(first, last):
                there = here = 0.0
                for j in range(last, end):
                    part = speed[order[j]] / share[s + 1]
                    there += part * link[order[i], order[j]]
                    here += part * link[order[j], order[i]]
                part = speed[order[i]] / own
                ahead, back = max(ahead, part * there), max(back, part * here)
            for j in range(last, end):
                there = here = 0.0
                for i in range(first, last):
                    part = speed[order[i]] / own
                    there += part * link[order[i], order[j]]
                    here += part * link[order[j], order[i]]
                part = speed[order[j]] / share[s + 1]
                ahead, back = max(ahead, part * there), max(back, part * here)
            output = output_at(outputs, done)
            slope = output_at(outputs, done + 0.5 / S) - output_at(outputs, done - 0.5 / S)
            ahead *= math.exp(output)
            back *= math.exp(output)
        size = last - first
        slowest, room = 0.0, np.inf
        for i in range(first, last):
            k = order[i]
            for j in range(first, last):
                slowest = max(slowest, link_reduce[k, order[j]])
            part = speed[k] / own
            # share of the model that fits
            fits = 1.0 / (1.0 / max(capacity[k, 0], 1e-6) + flight[s] * part / max(capacity[k, 1], 1e-6))
            room = min(room, fits)
        room /= own
        v = values[s]
        v[0] = own * S
        v[1] = math.log(own * S)
        v[2] = size / K
        v[3] = 1.0 if size > 1 else 0.0
        v[4] = s / max(S - 1, 1)
        v[5] = 1.0 / (S - s)
        v[6] = flight[s] / 8.0
        v[7] = _ratio(ahead)
        v[8] = _ratio(back)
        v[9] = _ratio(ahead_before)
        v[10] = _ratio(back_before)
        v[11] = _ratio(ahead + back)
        v[12] = _ratio(2.0 * (1.0 - 1.0 / size) * own * slowest)
        v[13] = min(max(math.log(room), -2.0), 2.0)
        v[14] = 1.0 if room < 1.0 else 0.0
        v[15] = 1.0 if s == S - 1 else 0.0
        v[16] = 0.5 * output
        v[17] = 0.5 * output_before
        v[18] = 0.5 * slope
        ahead_before, back_before, output_before = ahead, back, output


@njit(cache=True)
def read_all_stages(order, starts, speed, link, link_reduce, capacity, flight, outputs):
    """share [A, N, S], part [A, N, S, K] of each device in its stage's speed (0 for the others) and values
    [A, N, S, STAGE_FEATURES] of strategies [A, N, ...]; see `read_stages`."""
    A, N, S = starts.shape[0], starts.shape[1], starts.shape[2] - 1
    share, values = np.empty((A, N, S), np.float32), np.empty((A, N, S, STAGE_FEATURES), np.float32)
    part = np.zeros((A, N, S, speed.shape[1]), np.float32)
    for a in range(A):
        for n in range(N):
            read_stages(order[a, n], starts[a, n], speed[a], link[a], link_reduce[a], capacity[a], flight[a],
                        outputs[a], share[a, n], values[a, n])
            for s in range(S):
                for i in range(starts[a, n, s], starts[a, n, s + 1]):
                    part[a, n, s, order[a, n, i]] = speed[a, order[a, n, i]] / share[a, n, s]
    return share, part, values
