"""A certified lower bound of the exact step over all strategies of a problem that fit in memory.

The larger of a simple bound, for any problem, and, where the subset program (subset_program.py) is within reach, of
the longest path (critical_path.py, with the proofs) of the best pipeline that the program finds. Symbols: L layers,
K devices, S stages, M micro-batches; t(l, k) = F + B of layer l on device k.

The simple bound. A strategy shares each layer out over devices in fractions x(l, k), and a stage is as busy as each of
its devices, so that the busiest stage has at least max over k of sum over l of x t >= sum over l of min over k of
mu(k) t(l, k), for any weights mu >= 0 with sum 1 (here the speeds): M times that. One micro-batch needs R, the sum over
layers of what the K - S + 1 fastest devices need together, 1 / sum of 1 / t (groups of any layers need no less, as this
is concave), and the least latencies; under 1F1B, stage 0 makes ceil(M / S) such trips in turn. Where S = K, each device
has a layer.
"""

import math

import numpy as np

from . import subset_program
from .problem import Problem
from .search import restarts

ROUNDING = 1e-9  # relative; sums in another order differ by less
RUNS, MOVES, HOT, COLD = 3, 10_000, 0.1, 0.001  # of annealing
LONG_OPS, FEWEST_MOVES = 1 << 14, 300  # S x M from which on moves become fewer, as each takes longer
TRIES = 2  # limits
NEAR = 0.96  # of a limit: the next to try where the program was given up
CLOSE = 0.999  # of the upper limit: not worth another try
MOST_KEYS, MOST_PAIRS, MOST_WORK = 1.2e7, 5e7, 3e7  # of the program: seconds at most


def lower_bound(problem: Problem, upper_s: float | None = None) -> float:
    """s that no feasible strategy of the problem can beat; finite, and over 0 where there is work.

    upper_s: the step of a feasible strategy, if one is known, which spares the search for one. Where no strategy fits
    in memory, the bound is for the problem without a limit.
    """
    least = simple_bound(problem)
    program = subset_program.build(problem, MOST_KEYS, MOST_PAIRS)
    if program is None:
        return least
    if upper_s is None:
        upper_s = attained(problem)
    if upper_s is None and not subset_program.feasible(program):
        return lower_bound(problem.without_memory_limit())
    for limit in rising(least) if upper_s is None else ():
        _, value = subset_program.solve(program, limit, MOST_WORK)
        if value == subset_program.GIVEN_UP:
            return least
        least = max(least, min(value, limit) * (1.0 - ROUNDING))
        if value < limit:
            upper_s = limit
            break
    # the lower the limit, the fewer labels are merged: a limit below which there is nothing is itself a bound
    limit = upper_s
    for _ in range(TRIES):
        _, value = subset_program.solve(program, limit, MOST_WORK)
        if value == subset_program.GIVEN_UP:
            upper_s, limit = limit, NEAR * limit
            continue
        least = max(least, min(value, limit) * (1.0 - ROUNDING))
        if least >= CLOSE * upper_s:
            break
        limit = 0.5 * (least + upper_s)
    return least


def rising(least: float):
    """Limits to try where no feasible step is known."""
    limit = max(least, 1e-12)
    while limit < math.inf:
        limit *= 1.1
        yield limit


def attained(problem: Problem) -> float | None:
    """s that a short annealing run attains within memory, None where it finds nothing that fits."""
    share = min(1.0, LONG_OPS / (problem.stages * problem.micro_batches))
    moves = max(int(MOVES * share), FEWEST_MOVES)
    _, step, overflow = restarts(problem, RUNS, moves, (HOT, COLD), np.random.default_rng(0))
    return step if overflow == 0.0 else None


def simple_bound(problem: Problem) -> float:
    """The bound that needs no program, s."""
    K, S, M = problem.devices, problem.stages, problem.micro_batches
    layer_s = problem.forward_s + problem.backward_s
    speed = 1.0 / np.maximum(layer_s.sum(axis=0), 1e-30)
    busiest = (layer_s * (speed / speed.sum())).min(axis=1).sum()
    if S == K:
        busiest = max(busiest, layer_s.min(axis=0).max())
    fastest = np.sort(layer_s, axis=1)[:, :K - S + 1]
    together = np.where(fastest[:, 0] > 0.0, 1.0 / (1.0 / np.maximum(fastest, 1e-300)).sum(axis=1), 0.0)
    apart = ~np.eye(K, dtype=bool)
    around = together.sum()
    if S > 1:
        around += 2 * (S - 1) * problem.latency_s[apart].min()
    trips = math.ceil(M / S) if problem.schedule == "1f1b" else 1
    return float(max(M * busiest, trips * around)) * (1.0 - ROUNDING)
