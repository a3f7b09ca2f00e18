"""Schedules: in which order every stage runs its operations.

An operation is (stage s, kind, micro-batch m) with kind F = 0 (forward) or B = 1 (backward); its text form is `0F3`.
Symbols: S stages, M micro-batches.
"""

from functools import lru_cache

import numpy as np
from numba import njit

F, B = 0, 1


def stage_order(schedule: str, S: int, M: int) -> np.ndarray:
    """[S, 2 M, 2] (kind, micro-batch) of every stage's operations in order.

    GPipe (Huang et al. 2019): all F's, then all B's. 1F1B (PipeDream-Flush, Narayanan et al. 2021): stage s runs
    min(S - s - 1, M) F's, then F, B in turn, then the remaining B's.
    """
    return _gpipe(S, M) if schedule == "gpipe" else _one_f_one_b(S, M)


def in_flight(schedule: str, S: int, M: int) -> np.ndarray:
    """[S] the most micro-batches whose activations stage s keeps at one time."""
    if schedule == "gpipe":
        return np.full(S, M, dtype=np.float64)
    return np.minimum(M, S - np.arange(S)).astype(np.float64)


def text(schedule: str, S: int, M: int) -> str:
    """One line a stage, the operations in order: `0F0 0F1 0B0 0B1`."""
    order = stage_order(schedule, S, M)
    return "\n".join(" ".join(f"{s}{'FB'[kind]}{m}" for kind, m in order[s]) for s in range(S))


@lru_cache(maxsize=256)
def program(schedule: str, S: int, M: int) -> np.ndarray:
    """[2 S M, 3] (stage, kind, micro-batch): all operations in an order in which each comes after what it needs.

    Raises ValueError where the stage orders wait for each other in a circle.
    """
    ops, done = _merge(stage_order(schedule, S, M))
    if done < len(ops):
        raise ValueError(f"schedule {schedule} of {S} stages and {M} micro-batches waits for itself in a circle")
    ops.flags.writeable = False
    return ops


@njit(cache=True)
def _gpipe(S, M):
    order = np.empty((S, 2 * M, 2), np.int64)
    for s in range(S):
        for i in range(2 * M):
            order[s, i, 0] = F if i < M else B
            order[s, i, 1] = i % M
    return order


@njit(cache=True)
def _one_f_one_b(S, M):
    order = np.empty((S, 2 * M, 2), np.int64)
    for s in range(S):
        warm_up = min(S - s - 1, M)
        f = b = 0
        for i in range(2 * M):
            forward = f < M and f < b + warm_up + 1
            order[s, i, 0] = F if forward else B
            order[s, i, 1] = f if forward else b
            if forward:
                f += 1
            else:
                b += 1
    return order


@njit(cache=True)
def _merge(order):
    """Rounds over the stages, at most one operation a stage and round: neighbouring operations of the result are
    then independent of each other, which lets a processor overlap them."""
    S, n = order.shape[0], order.shape[1]
    M = n // 2
    round_done = np.full((2, S, M), n * S + 1, np.int64)  # the round in which an operation ran
    position = np.zeros(S, np.int64)
    ops = np.empty((S * n, 3), np.int64)
    done = 0
    for now in range(n * S + 1):
        before = done
        for s in range(S):
            if position[s] == n:
                continue
            kind, m = order[s, position[s]]
            ready = True
            if kind == F:
                if s > 0:
                    ready = round_done[F, s - 1, m] < now
            else:
                ready = round_done[F, s, m] < now
                if s < S - 1:
                    ready = ready and round_done[B, s + 1, m] < now
            if ready:
                round_done[kind, s, m] = now
                ops[done, 0], ops[done, 1], ops[done, 2] = s, kind, m
                position[s] += 1
                done += 1
        if done == before:
            break
    return ops, done
