"""What planners that assume equal devices see of a problem, and the program over layers and devices that they share.

Costs are means over devices; the link is the mean one: mean seconds per byte and mean latency over all directed pairs,
so that a mean transfer takes its mean time. A stage of layers i .. j - 1 with n replicas has load[n, i, j].
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from .. import schedule
from ..problem import Problem, Strategy


class Equal(NamedTuple):
    """A problem on equal devices; sums over a range of layers are differences of running sums."""

    work: np.ndarray  # [L + 1] s, forward + backward, running sum
    stash: np.ndarray  # [L + 1] bytes, running sum
    static: np.ndarray  # [L + 1] bytes, running sum
    gradient: np.ndarray  # [L + 1] bytes, running sum
    output: np.ndarray  # [L + 1] bytes that arrive at layer l (and whose gradient goes back); 0 at both ends
    s_per_byte: float
    latency: float  # s
    in_flight: np.ndarray  # [S] micro-batches
    devices: int
    micro_batches: int


def equal_devices(problem: Problem) -> Equal:
    """The mean view of a problem."""
    def running(a):
        return np.concatenate([[0.0], np.cumsum(a)])

    pairs = ~np.eye(problem.devices, dtype=bool)
    linked = problem.devices > 1
    output = np.concatenate([[0.0], problem.output_bytes])
    output[-1] = 0.0
    return Equal(
        running((problem.forward_s + problem.backward_s).mean(axis=1)), running(problem.stash_bytes),
        running(problem.static_bytes), running(problem.gradient_bytes), output,
        float((1.0 / problem.bandwidth_bytes_per_s[pairs]).mean()) if linked else 0.0,
        float(problem.latency_s[pairs].mean()) if linked else 0.0,
        schedule.in_flight(problem.schedule, problem.stages, problem.micro_batches), problem.devices,
        problem.micro_batches)


@njit(cache=True)
def all_reduce(e, n, i, j):
    """s of the ring all-reduce of n replicas over the mean link, once a step."""
    return 2.0 * (n - 1) / n * (e.gradient[j] - e.gradient[i]) * e.s_per_byte + 2.0 * (n - 1) * e.latency


@njit(cache=True)
def program(load, e, memory, S, cap, bottleneck):
    """Least maximum (bottleneck) or least sum of the loads of S stages, each load <= cap and within memory.

    load: [K + 1, L + 1, L + 1] s; memory: bytes of every device
    Returns value [K + 1] by the exact number of devices (inf: impossible) and choice [S, L + 1, K + 1, 2]: of the
    plan for the first s + 1 stages, the first layer and the devices of its last stage.
    """
    K, L = load.shape[0] - 1, load.shape[1] - 1
    value = np.full((L + 1, K + 1), np.inf)
    value[0, 0] = 0.0
    choice = np.zeros((S, L + 1, K + 1, 2), np.int64)
    for s in range(S):
        before, value = value, np.full((L + 1, K + 1), np.inf)
        last = s == S - 1
        for i in range(s, L - (S - 1 - s)):
            for j in range(L if last else i + 1, L - (S - 1 - s) + 1):
                static = e.static[j] - e.static[i]
                stash = (e.stash[j] - e.stash[i]) * e.in_flight[s]
                for n in range(1, K - S + 2):
                    own = load[n, i, j]
                    if own > cap or static + stash / n > memory:
                        continue
                    for k in range(s, K - (S - 1 - s) - n + 1):
                        new = max(before[i, k], own) if bottleneck else before[i, k] + own
                        if new < value[j, k + n]:
                            value[j, k + n] = new
                            choice[s, j, k + n, 0], choice[s, j, k + n, 1] = i, n
    return value[L], choice


def stage_loads(load: np.ndarray, strategy: Strategy) -> list[float]:
    """[S] s of a strategy's stages from load [K + 1, L + 1, L + 1]."""
    bounds = strategy.bounds(load.shape[1] - 1)
    return [float(load[len(group), bounds[s], bounds[s + 1]]) for s, group in enumerate(strategy.groups)]


def read_plan(choice, devices: int) -> tuple[list[int], list[int]]:
    """Bounds [S + 1] and group sizes [S] of the plan that uses exactly `devices` devices."""
    S, L = choice.shape[0], choice.shape[1] - 1
    bounds, sizes = [L], []
    for s in range(S - 1, -1, -1):
        first, n = choice[s, bounds[0], devices].tolist()
        bounds.insert(0, first)
        sizes.insert(0, n)
        devices -= n
    return bounds, sizes
