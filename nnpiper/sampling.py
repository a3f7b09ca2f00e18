"""The compiled half of the network's drawing loop: what comes before and after its matrix products, for every step.

The autograd path (Network.log_prob) scores the same actions again from the recorded states; a test holds the two to
each other. Symbols as in network.py: A problems, N strategies each, K devices, S stages, C link channels. Actions:
k < K opens the next stage with device k, K + k lets k join the open stage, 2 K stops.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from .search import uniform


class Partial(NamedTuple):
    """A x N partial strategies."""

    used: np.ndarray  # [A, N, K] bool
    group: np.ndarray  # [A, N, K] bool, devices of the open stage
    last: np.ndarray  # [A, N] device picked last, K: none yet
    opened: np.ndarray  # [A, N] stages opened


def initial(A: int, N: int, K: int) -> Partial:
    """Nothing picked yet."""
    none = np.zeros((A, N, K), np.bool_)
    return Partial(none, none.copy(), np.full((A, N), K), np.zeros((A, N), np.int64))


@njit(cache=True, fastmath=True)
def fill_context(state, S, speed, whole, last, group, free, weight, bias, out):
    """out [A, N, D]: the query's input, as Network.logits makes it. weight [features, D], bias [D]."""
    A, N, D = out.shape
    K = speed.shape[1]
    for a in range(A):
        for n in range(N):
            left = size = 0
            free_speed = group_speed = 0.0
            for k in range(K):
                if not state.used[a, n, k]:
                    left += 1
                    free_speed += speed[a, k]
                if state.group[a, n, k]:
                    size += 1
                    group_speed += speed[a, k]
            to_open = S - state.opened[a, n]
            x = out[a, n]
            row = last[a, state.last[a, n]]
            first = whole[a, 0]
            values = state_features(to_open, left, size, free_speed, group_speed, S, K)
            for d in range(D):
                x[d] = first[d] + row[d] + bias[d]
            for i in range(len(values)):
                value = np.float32(values[i])
                for d in range(D):
                    x[d] += value * weight[i, d]
            part = np.float32(1.0 / max(left, 1))
            for k in range(K):
                if state.group[a, n, k]:
                    row = group[a, k]
                    for d in range(D):
                        x[d] += row[d]
                if not state.used[a, n, k]:
                    row = free[a, k]
                    for d in range(D):
                        x[d] += part * row[d]


@njit(cache=True)
def state_features(to_open, left, size, free_speed, group_speed, S, K):
    """What the pointer knows of a partial strategy, in numbers (Network._state_features has the same in torch)."""
    return (to_open / S, left / K, free_speed, group_speed * S, math.log(max(group_speed * S, 0.01)), size / K,
            to_open / max(left, 1), free_speed / max(to_open, 1) * S, 1.0 if to_open == 0 else 0.0)


@njit(cache=True)
def pick(state, S, rank, scores, extra, links, clip, greedy, random, actions):
    """Draw one action for each partial strategy (Gumbel-max) into actions [A, N] and apply it; with greedy, number 0
    takes the likeliest. scores [A, N, 2 K] query times keys, extra [A, N, 2 C + 1] link weights and the stop logit,
    links [A, K, K 2 C]."""
    A, N, K = state.used.shape
    C = (extra.shape[2] - 1) // 2
    mean = np.zeros(links.shape[2], np.float32)
    for a in range(A):
        for n in range(N):
            left = size = 0
            mean[:] = 0.0
            for k in range(K):
                left += not state.used[a, n, k]
                if state.group[a, n, k]:
                    size += 1
                    for i in range(mean.shape[0]):
                        mean[i] += links[a, k, i]
            to_open = S - state.opened[a, n]
            last_rank = rank[a, state.last[a, n]] if state.last[a, n] < K else -1.0
            best, choice = -np.inf, -1
            if to_open == 0:
                best, choice = _noisy(extra[a, n, 2 * C], clip, greedy and n == 0, random), 2 * K
            for k in range(K):
                if state.used[a, n, k]:
                    continue
                for join in range(2):
                    if join:
                        allowed = to_open < S and left > to_open and rank[a, k] > last_rank
                    else:
                        allowed = to_open > 0
                    if not allowed:
                        continue
                    logit = scores[a, n, join * K + k]
                    if size > 0:
                        dot = 0.0
                        for c in range(C):
                            dot += mean[(k * 2 + join) * C + c] * extra[a, n, join * C + c]
                        logit += dot / size
                    value = _noisy(logit, clip, greedy and n == 0, random)
                    if value > best:
                        best, choice = value, join * K + k
            actions[a, n] = choice
    apply(state, actions)


@njit(cache=True)
def apply(state, actions):
    """Carry out one action for each partial strategy, actions [A, N]."""
    A, N, K = state.used.shape
    for a in range(A):
        for n in range(N):
            choice = actions[a, n]
            if choice == 2 * K:
                state.group[a, n, :] = False
                state.used[a, n, :] = True
                continue
            if choice < K:
                state.group[a, n, :] = False
                state.opened[a, n] += 1
            state.group[a, n, choice % K] = True
            state.used[a, n, choice % K] = True
            state.last[a, n] = choice % K


@njit(cache=True)
def _noisy(logit, clip, greedy, random):
    value = clip * math.tanh(logit / clip)
    return value if greedy else value - math.log(-math.log(uniform(random)))
