"""Drawing strategies from the network, compiled: at each step every partial strategy asks for its next action.

The autograd path (Network.log_prob) scores the same actions again from the recorded states; a test holds the two to
each other. Symbols as in network.py: A problems, N strategies each, K devices, S stages, D width, C link channels.
Actions: k < K opens the next stage with device k, K + k lets k join the open stage, 2 K stops.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from .kernels import dense
from .readings import STATE_FEATURES, read_state
from .xorshift import uniform


class Partial(NamedTuple):
    """N partial strategies of one problem, or in [A, N, T, ...] those before each of T actions."""

    used: np.ndarray  # [N, K] bool
    group: np.ndarray  # [N, K] bool, devices of the open stage
    before: np.ndarray  # [N, K] bool, devices of the stage before
    last: np.ndarray  # [N] device picked last, K: none yet
    opened: np.ndarray  # [N] stages opened


class Query(NamedTuple):
    """The weights that turn a partial strategy into what it asks for: [in, out], and [out] for the constants."""

    state_weight: np.ndarray
    state_constant: np.ndarray
    middle_weight: np.ndarray
    middle_constant: np.ndarray
    out_weight: np.ndarray
    out_constant: np.ndarray


class Pointer(NamedTuple):
    """What a problem answers with; network.Encoding says what each is. Within `draw` without axis A."""

    speed: np.ndarray  # [A, K]
    rank: np.ndarray  # [A, K]
    outputs: np.ndarray  # [A, P + 1]
    whole: np.ndarray  # [A, 1, D]
    last: np.ndarray  # [A, K + 1, D]
    group: np.ndarray  # [A, K, D]
    free: np.ndarray  # [A, K, D]
    keys: np.ndarray  # [A, D, 2 K], divided by the root of D
    links: np.ndarray  # [A, K, K x 2 C]
    earlier: np.ndarray  # [A, K, K x C]


@njit(cache=True)
def draw(pointer, query, S, N, clip, greedy, random):
    """Actions [A, N, K] of N strategies for each problem; with greedy, number 0 takes the likeliest action at each
    step. Raises ValueError where the logits are no numbers."""
    A, K = pointer.speed.shape
    actions = np.empty((A, N, K), np.int64)
    width, wide = query.middle_weight.shape[1], query.out_weight.shape[1]
    context, middle = np.empty((N, width), np.float32), np.empty((N, width), np.float32)
    out, scores = np.empty((N, wide), np.float32), np.empty((N, 2 * K), np.float32)
    nothing, chosen = np.zeros(2 * K, np.float32), np.empty(N, np.int64)
    for a in range(A):
        p = Pointer(pointer.speed[a], pointer.rank[a], pointer.outputs[a], pointer.whole[a], pointer.last[a],
                    pointer.group[a], pointer.free[a], pointer.keys[a], pointer.links[a], pointer.earlier[a])
        state = _initial(N, K)
        for t in range(K):
            _fill_context(state, S, p, query, context)
            dense(context, query.middle_weight, query.middle_constant, True, middle)
            dense(middle, query.out_weight, query.out_constant, False, out)
            dense(out[:, :width], p.keys, nothing, False, scores)
            _pick(state, S, p, scores, out[:, width:], clip, greedy, random, chosen)
            actions[a, :, t] = chosen
    return actions


@njit(cache=True)
def replay(actions):
    """The partial strategies before each of the actions [A, N, K]."""
    A, N, K = actions.shape
    shape = A, N, K, K
    states = Partial(np.empty(shape, np.bool_), np.empty(shape, np.bool_), np.empty(shape, np.bool_),
                     np.empty((A, N, K), np.int64), np.empty((A, N, K), np.int64))
    for a in range(A):
        state = _initial(N, K)
        for t in range(K):
            states.used[a, :, t] = state.used
            states.group[a, :, t] = state.group
            states.before[a, :, t] = state.before
            states.last[a, :, t] = state.last
            states.opened[a, :, t] = state.opened
            _apply(state, actions[a, :, t])
    return states


@njit(cache=True)
def _initial(N, K):
    """Nothing picked yet."""
    return Partial(np.zeros((N, K), np.bool_), np.zeros((N, K), np.bool_), np.zeros((N, K), np.bool_),
                   np.full(N, K, np.int64), np.zeros(N, np.int64))


@njit(cache=True, fastmath=True)
def _fill_context(state, S, p, query, out):
    """out [N, D]: the query's input, as Network.logits makes it, past its first ReLU."""
    N, D = out.shape
    K = p.speed.shape[0]
    values = np.empty(STATE_FEATURES, np.float32)
    weight = query.state_weight
    for n in range(N):
        left = 0
        for k in range(K):
            left += not state.used[n, k]
        x, row, first = out[n], p.last[state.last[n]], p.whole[0]
        read_state(state.used[n], state.group[n], state.opened[n], S, p.speed, p.outputs, values)
        for d in range(D):
            x[d] = first[d] + row[d] + query.state_constant[d]
        for i in range(STATE_FEATURES):
            for d in range(D):
                x[d] += values[i] * weight[i, d]
        part = np.float32(1.0 / max(left, 1))
        for k in range(K):
            if state.group[n, k]:
                row = p.group[k]
                for d in range(D):
                    x[d] += row[d]
            if not state.used[n, k]:
                row = p.free[k]
                for d in range(D):
                    x[d] += part * row[d]
        for d in range(D):
            x[d] = max(x[d], np.float32(0.0))


@njit(cache=True)
def _pick(state, S, p, scores, extra, clip, greedy, random, actions):
    """Draw one action for each partial strategy (Gumbel-max) into actions [N] and apply it. scores [N, 2 K] query times
    keys, extra [N, 3 C + 1] link weights and the stop logit."""
    N, K = state.used.shape
    C = (extra.shape[1] - 1) // 3
    mean, mean_before = np.zeros(K * 2 * C, np.float32), np.zeros(K * C, np.float32)
    for n in range(N):
        size, size_before = _sum(state.group[n], p.links, mean), _sum(state.before[n], p.earlier, mean_before)
        left = K - state.used[n].sum()
        to_open = S - state.opened[n]
        last_rank = p.rank[state.last[n]] if state.last[n] < K else np.float32(-1.0)
        likeliest = greedy and n == 0
        best, choice = -np.inf, -1
        if to_open == 0:
            best, choice = _noisy(extra[n, 3 * C], clip, likeliest, random), 2 * K
        for k in range(K):
            if state.used[n, k]:
                continue
            for join in range(2):
                if join:
                    allowed = to_open < S and left > to_open and p.rank[k] > last_rank
                else:
                    allowed = to_open > 0
                if not allowed:
                    continue
                logit = scores[n, join * K + k]
                if size > 0:
                    dot = 0.0
                    for c in range(C):
                        dot += mean[(k * 2 + join) * C + c] * extra[n, join * C + c]
                    logit += dot / size
                if join and size_before > 0:
                    dot = 0.0
                    for c in range(C):
                        dot += mean_before[k * C + c] * extra[n, 2 * C + c]
                    logit += dot / size_before
                value = _noisy(logit, clip, likeliest, random)
                if value > best:
                    best, choice = value, join * K + k
        if choice < 0:
            raise ValueError("the network's logits are no numbers")
        actions[n] = choice
    _apply(state, actions)


@njit(cache=True, fastmath=True)
def _sum(group, rows, total):
    """Sum of the group's rows into total; how many there are."""
    total[:] = 0.0
    size = 0
    for k in range(group.shape[0]):
        if group[k]:
            size += 1
            for i in range(total.shape[0]):
                total[i] += rows[k, i]
    return size


@njit(cache=True)
def _apply(state, actions):
    """Carry out one action for each partial strategy, actions [N]."""
    N, K = state.used.shape
    for n in range(N):
        choice = actions[n]
        if choice == 2 * K:
            state.group[n, :] = False  # with the next line only to save sums: nothing but stop is allowed from here on
            state.before[n, :] = False
            state.used[n, :] = True
            continue
        if choice < K:
            state.before[n, :] = state.group[n]
            state.group[n, :] = False
            state.opened[n] += 1
        state.group[n, choice % K] = True
        state.used[n, choice % K] = True
        state.last[n] = choice % K


@njit(cache=True)
def _noisy(logit, clip, greedy, random):
    value = clip * math.tanh(logit / clip)
    return value if greedy else value - math.log(-math.log(uniform(random)))
