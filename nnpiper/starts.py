"""Plain starts for local search: what can be said in microseconds about where the devices should go, without a network.

Symbols: K devices, S stages.
"""

import numpy as np
from numba import njit

from . import memory, simulator
from .problem import Problem
from .search import proportional_states

CHAINS = 4  # of near neighbours, beside the one from the fastest device


def best_start(problem: Problem, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best of the `plain_starts`."""
    return tuple(part[0] for part in plain_starts(problem, rng)[0])


def plain_starts(problem: Problem, rng: np.random.Generator) -> tuple[tuple, np.ndarray, np.ndarray]:
    """The best state on all devices, on one a stage, and on a number between, since slow links may leave most of them
    idle: (bounds, order, starts) as `cost.encode` writes them, steps in s and bytes over memory, the best first. Each
    is the best of the proportional states of nine orders, cut to fit by `memory.fit`: devices by rising
    speed (the slowest gets the first layers, which are light in a transformer), by falling memory (the first stages
    keep the most micro-batches), in random order, and as `_chains` from the fastest device, forwards and backwards, and
    from some others."""
    K, whole_s, numbers = problem.devices, (problem.forward_s + problem.backward_s).sum(axis=0), used_devices(problem)
    way_s = problem.latency_s + problem.output_bytes.mean() / problem.bandwidth_bytes_per_s
    firsts = np.concatenate([[whole_s.argmin()], rng.integers(K, size=CHAINS)])
    chains = _chains(way_s + way_s.T, whole_s / problem.stages, firsts)
    by_speed = np.argsort(-whole_s, kind="stable")
    others = np.argsort(-problem.memory_bytes, kind="stable"), rng.permutation(K), *chains
    orders = np.stack([order for used in numbers for order in (
        np.roll(by_speed, used), np.concatenate([chains[0, :used][::-1], chains[0, used:]]), *others)])
    states = proportional_states(problem, orders, np.repeat(numbers, len(orders) // len(numbers)))
    step_s, overflow = simulator.step_times(problem, *states)
    memory.fit(problem, states, step_s, overflow)
    rank = np.lexsort((step_s, overflow))
    _, first = np.unique(states[2][rank, -1], return_index=True)  # the best on each number of devices
    best = rank[np.sort(first)]
    return tuple(part[best] for part in states), step_s[best], overflow[best]


def used_devices(problem: Problem) -> list[int]:
    """How many devices plain starts use: one a stage, all, and the geometric mean of both."""
    K, S = problem.devices, problem.stages
    return sorted({S, round((K * S) ** 0.5), K})


@njit(cache=True)
def _chains(way_s, own_s, firsts):
    """[N, K] devices: from the first one always on to the one that soonest has a micro-batch and an even share of the
    model's work on it done."""
    K = len(own_s)
    chains = np.empty((len(firsts), K), np.int64)
    for chain, first in zip(chains, firsts):
        left = np.ones(K, np.bool_)
        chain[0] = first
        for i in range(1, K):
            left[chain[i - 1]] = False
            soonest, nearest = np.inf, -1
            for k in range(K):
                done_s = way_s[chain[i - 1], k] + own_s[k]
                if left[k] and (nearest < 0 or done_s < soonest):
                    soonest, nearest = done_s, k
            chain[i] = nearest
    return chains
