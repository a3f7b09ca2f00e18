"""Random strategies, and all strategies of a tiny problem, made without the package's own encoders.

Symbols: L layers, K devices, S stages.
"""

from itertools import combinations, product

import numpy as np

from nnpiper.problem import Problem, Strategy


def random_strategy(rng: np.random.Generator, problem: Problem) -> Strategy:
    """Any valid strategy: groups of all sizes, some devices unused, any cuts."""
    L, K, S = problem.layers, problem.devices, problem.stages
    devices = rng.permutation(K)
    stage = np.concatenate([np.arange(S), rng.integers(0, S + 1, K - S)])  # stage S: unused
    groups = tuple(tuple(devices[stage == s]) for s in range(S))
    return Strategy(tuple(np.sort(rng.choice(np.arange(1, L), S - 1, replace=False))), groups)


def all_strategies(problem: Problem) -> list[Strategy]:
    """Every valid strategy, once."""
    L, K, S = problem.layers, problem.devices, problem.stages
    every_groups = [tuple(tuple(k for k in range(K) if stage[k] == s) for s in range(S))
                    for stage in product(range(S + 1), repeat=K) if set(range(S)) <= set(stage)]
    return [Strategy(cuts, groups) for cuts in combinations(range(1, L), S - 1) for groups in every_groups]


def shuffled(rng: np.random.Generator, problem: Problem) -> tuple[Problem, np.ndarray]:
    """The problem with its devices renamed, and the old name [K] of each."""
    old = rng.permutation(problem.devices)
    return problem.replace(
        forward_s=problem.forward_s[:, old], backward_s=problem.backward_s[:, old],
        memory_bytes=problem.memory_bytes[old], latency_s=problem.latency_s[np.ix_(old, old)],
        bandwidth_bytes_per_s=problem.bandwidth_bytes_per_s[np.ix_(old, old)]), old


def odd_problem(rng: np.random.Generator, problem: Problem) -> Problem:
    """The problem with something extreme in it: zero or huge links, layers or devices without work, equal devices."""
    kind, L, K = rng.integers(8), problem.layers, problem.devices
    if kind == 0:
        return problem.replace(output_bytes=np.zeros(L), latency_s=np.zeros((K, K)))
    if kind == 1:
        return problem.replace(latency_s=1e6 * problem.latency_s, gradient_bytes=1e6 * problem.gradient_bytes)
    if kind == 2:
        return problem.replace(bandwidth_bytes_per_s=np.where(rng.random((K, K)) < 0.3, 1e-3, 1e30))
    if kind == 3:
        idle = (rng.random(L) < 0.5)[:, None]
        return problem.replace(forward_s=np.where(idle, 0.0, problem.forward_s),
                               backward_s=np.where(idle, 0.0, problem.backward_s))
    if kind == 4:
        idle = rng.random(K) < 0.3
        return problem.replace(forward_s=np.where(idle, 0.0, problem.forward_s),
                               backward_s=np.where(idle, 0.0, problem.backward_s))
    if kind == 5:
        return problem.replace(forward_s=np.zeros((L, K)))
    if kind == 6:
        return problem.replace(forward_s=np.repeat(problem.forward_s[:, :1], K, 1),
                               backward_s=np.repeat(problem.backward_s[:, :1], K, 1))
    return problem.replace(forward_s=np.ones((L, K)), backward_s=np.ones((L, K)), output_bytes=np.ones(L),
                           bandwidth_bytes_per_s=np.ones((K, K)), latency_s=np.zeros((K, K)))
