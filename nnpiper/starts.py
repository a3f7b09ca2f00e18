"""Plain starts for local search: what can be said in microseconds about where the devices should go, without a network.

Symbols: K devices, S stages.
"""

import numpy as np

from . import simulator
from .problem import Problem
from .search import device_speed, proportional_states


def best_start(problem: Problem, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The best of five proportional states (bounds, order, starts), feasible ones first: devices by rising speed (the
    slowest gets the first layers, which are light in a transformer), by falling memory (the first stages keep the most
    micro-batches), as a chain of near neighbours, and twice in random order."""
    K = problem.devices
    orders = (np.argsort(device_speed(problem.forward_s + problem.backward_s), kind="stable"),
              np.argsort(-problem.memory_bytes, kind="stable"), _chain(problem, int(rng.integers(K))),
              rng.permutation(K), rng.permutation(K))
    states = proportional_states(problem, np.stack(orders))
    step_s, overflow = simulator.step_times(problem, *states)
    return tuple(part[np.lexsort((step_s, overflow))[0]] for part in states)


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
