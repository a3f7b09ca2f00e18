"""Batch: several problems of equal size as one set of arrays, and strategies for all of them scored in one call.

Symbols: A problems, N strategies for each, L layers, K devices, S stages.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from . import simulator
from .cost import Packed
from .problem import SHAPES, Problem
from .schedule import in_flight
from .search import cuts_by_share, layer_work


@dataclass(frozen=True, eq=False)
class Batch:
    """The fields of `Problem` with a leading axis A; stages, micro_batches, schedule, transfers are common to all."""

    forward_s: np.ndarray  # [A, L, K]
    backward_s: np.ndarray  # [A, L, K]
    output_bytes: np.ndarray  # [A, L]
    stash_bytes: np.ndarray  # [A, L]
    static_bytes: np.ndarray  # [A, L]
    gradient_bytes: np.ndarray  # [A, L]
    memory_bytes: np.ndarray  # [A, K]
    bandwidth_bytes_per_s: np.ndarray  # [A, K, K], infinite on the diagonal
    latency_s: np.ndarray  # [A, K, K], 0 on the diagonal
    stages: int
    micro_batches: int
    schedule: str
    transfers: str

    @classmethod
    def of(cls, problems: list[Problem]) -> "Batch":
        """Stack problems that agree in all sizes, schedule and transfers."""
        first = problems[0]
        arrays = {name: np.stack([getattr(problem, name) for problem in problems]) for name in SHAPES}
        return cls(**arrays, stages=first.stages, micro_batches=first.micro_batches, schedule=first.schedule,
                   transfers=first.transfers)

    def problem(self, a: int) -> Problem:
        """Problem number a."""
        arrays = {name: getattr(self, name)[a] for name in SHAPES}
        return Problem(**arrays, stages=self.stages, micro_batches=self.micro_batches, schedule=self.schedule,
                       transfers=self.transfers)

    def strategies(self, actions: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """bounds, order, starts [A, N R, ...], as `cost.encode` writes strategies, of the network's groupings (actions
        [A, N, K]) with R divisions each (shares of the work [A, N, R, S])."""
        A, N, R, S = share.shape
        order, starts = (np.repeat(a, R, axis=1) for a in assemble(actions, S))
        work = layer_work(self.forward_s + self.backward_s)
        bounds = np.stack([cuts_by_share(work[a], share[a].reshape(N * R, S)) for a in range(A)])
        return bounds, order, starts

    def step_times(self, bounds: np.ndarray, order: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[A, N] step times in s and [A, N] bytes over memory of strategies [A, N, ...] as `cost.encode` has them."""
        def running(a):
            return np.concatenate([np.zeros_like(a[:, :1]), np.cumsum(a, axis=1)], axis=1)

        S, M = self.stages, self.micro_batches
        return _step_times(running(self.forward_s), running(self.backward_s), running(self.stash_bytes),
                           running(self.static_bytes), running(self.gradient_bytes), self.output_bytes,
                           self.memory_bytes, 1.0 / self.bandwidth_bytes_per_s, self.latency_s,
                           in_flight(self.schedule, S, M), simulator.op_table(self.schedule, S, M),
                           self.transfers == "blocking", self.schedule == "1f1b", M, bounds, order, starts)


@njit(cache=True)
def _step_times(forward, backward, stash, static, gradient, output, memory, s_per_byte, latency, flight, ops, blocking,
                one_f_one_b, M, bounds, order, starts):
    A, N = bounds.shape[0], bounds.shape[1]
    step, overflow = np.zeros((A, N)), np.zeros((A, N))
    for a in range(A):
        p = Packed(forward[a], backward[a], stash[a], static[a], gradient[a], output[a], memory[a], s_per_byte[a],
                   latency[a], flight)
        step[a], overflow[a] = simulator.evaluate_all(p, ops, blocking, one_f_one_b, M, bounds[a], order[a],
                                                          starts[a])
    return step, overflow


@njit(cache=True)
def assemble(actions, S):
    """order [A, N, K] and starts [A, N, S + 1] of the network's actions [A, N, K] (open k, join k, stop)."""
    A, N, K = actions.shape
    order, starts = np.zeros((A, N, K), np.int64), np.zeros((A, N, S + 1), np.int64)
    for a in range(A):
        for n in range(N):
            used = np.zeros(K, np.bool_)
            filled, stage = 0, 0
            for t in range(K):
                action = actions[a, n, t]
                if action == 2 * K:
                    break
                if action < K:
                    starts[a, n, stage] = filled
                    stage += 1
                order[a, n, filled] = action % K
                used[action % K] = True
                filled += 1
            starts[a, n, S] = filled
            for k in range(K):
                if not used[k]:
                    order[a, n, filled] = k
                    filled += 1
    return order, starts


def disassemble(order: np.ndarray, starts: np.ndarray, speed: np.ndarray) -> np.ndarray:
    """[K] the network's actions that build one strategy (order [K], starts [S + 1]): the reverse of `assemble`. The
    devices of a group go by falling speed [K]."""
    K = len(order)
    rank = np.argsort(np.argsort(-speed, kind="stable"))
    actions = np.full(K, 2 * K)
    for first, last in zip(starts, starts[1:]):
        group = sorted(order[first:last], key=lambda k: rank[k])
        actions[first:last] = [group[0], *(K + k for k in group[1:])]
    return actions
