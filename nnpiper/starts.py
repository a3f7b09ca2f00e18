"""Plain starts for local search: what can be said in microseconds about where the devices should go, without a network.

Symbols: K devices, S stages.
"""

import numpy as np

from . import simulator
from .problem import Problem
from .search import device_speed, proportional_states


def best_start(problem: Problem, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best of the `plain_starts`."""
    return plain_starts(problem, rng)[0]


def plain_starts(problem: Problem, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The best state (bounds, order, starts) on all devices, on one a stage, and on a number between, since slow links
    may leave most of them idle; the best comes first, feasible ones before all others. Each is the best of the
    proportional states of five orders: devices by rising speed (the slowest gets the first layers, which are light in a
    transformer), by falling memory (the first stages keep the most micro-batches), as a chain of near neighbours, and
    twice in random order."""
    K = problem.devices
    by_speed = np.argsort(device_speed(problem.forward_s + problem.backward_s), kind="stable")
    others = (np.argsort(-problem.memory_bytes, kind="stable"), _chain(problem, int(rng.integers(K))),
              rng.permutation(K), rng.permutation(K))
    found = []
    for used in used_devices(problem):
        fastest = np.concatenate([by_speed[K - used:], by_speed[:K - used]])
        states = proportional_states(problem, np.stack([fastest, *others]), used)
        step_s, overflow = simulator.step_times(problem, *states)
        best = np.lexsort((step_s, overflow))[0]
        found.append((overflow[best], step_s[best], tuple(part[best] for part in states)))
    return [state for _, _, state in sorted(found, key=lambda one: one[:2])]


def used_devices(problem: Problem) -> list[int]:
    """How many devices plain starts use: one a stage, all, and the geometric mean of both."""
    K, S = problem.devices, problem.stages
    return sorted({S, round((K * S) ** 0.5), K})


def _chain(problem, first):
    """[K] devices: from the first one always on to the nearest that is left."""
    way = problem.latency_s + problem.output_bytes.mean() / problem.bandwidth_bytes_per_s
    way = way + way.T
    order = [first]
    far = np.zeros(problem.devices)
    for _ in range(problem.devices - 1):
        far[order[-1]] = np.inf
        order.append(int(np.argmin(way[order[-1]] + far)))
    return np.array(order)
