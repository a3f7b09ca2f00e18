"""Cost model: Problem + Strategy -> the stage arrays that the simulator runs, and the memory of every device.

Symbols: F(s), B(s) forward and backward time of one micro-batch on stage s; a(k) the fraction of each micro-batch that
device k of a group takes; c(s) the transfer time from stage s to stage s + 1. The same compiled function serves one
strategy, a batch of them, and the inner loop of every search.

Compiled code sees a strategy as three arrays: bounds [S + 1] (stage s holds layers bounds[s] .. bounds[s + 1] - 1),
order [K] (devices, grouped by stage, unused ones last) and starts [S + 1] (group s is order[starts[s]:starts[s + 1]]).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from . import schedule
from .problem import Problem, Strategy

# rows of a stage-array matrix [5, S]
FORWARD, BACKWARD, SEND_FORWARD, SEND_BACKWARD, ALL_REDUCE = range(5)


class Packed(NamedTuple):
    """A problem as compiled code reads it; sums over a range of layers are differences of running sums."""

    forward: np.ndarray  # [L + 1, K] s, running sum over layers
    backward: np.ndarray  # [L + 1, K] s, running sum
    stash: np.ndarray  # [L + 1] bytes, running sum
    static: np.ndarray  # [L + 1] bytes, running sum
    gradient: np.ndarray  # [L + 1] bytes, running sum
    output: np.ndarray  # [L] bytes
    memory: np.ndarray  # [K] bytes
    s_per_byte: np.ndarray  # [K, K]
    latency: np.ndarray  # [K, K] s
    in_flight: np.ndarray  # [S] micro-batches


@dataclass(frozen=True)
class StageArrays:
    """The simulator's only input, seconds. S stages; boundary s lies between stage s and s + 1."""

    forward_s: np.ndarray  # [S] F(s), per micro-batch
    backward_s: np.ndarray  # [S] B(s), per micro-batch
    send_forward_s: np.ndarray  # [S - 1] activation over boundary s, per micro-batch
    send_backward_s: np.ndarray  # [S - 1] gradient back over boundary s, per micro-batch
    all_reduce_s: np.ndarray  # [S] once a step

    def matrix(self) -> np.ndarray:
        """[5, S] rows FORWARD .. ALL_REDUCE; the last column of the two send rows is 0."""
        out = np.zeros((5, len(self.forward_s)))
        out[FORWARD], out[BACKWARD], out[ALL_REDUCE] = self.forward_s, self.backward_s, self.all_reduce_s
        out[SEND_FORWARD, :-1], out[SEND_BACKWARD, :-1] = self.send_forward_s, self.send_backward_s
        return out


def pack(problem: Problem) -> Packed:
    """The compiled view of a problem."""
    def running(a):
        return np.concatenate([np.zeros((1, *a.shape[1:])), np.cumsum(a, axis=0)])

    return Packed(
        running(problem.forward_s), running(problem.backward_s), running(problem.stash_bytes),
        running(problem.static_bytes), running(problem.gradient_bytes), problem.output_bytes, problem.memory_bytes,
        1.0 / problem.bandwidth_bytes_per_s, problem.latency_s,
        schedule.in_flight(problem.schedule, problem.stages, problem.micro_batches))


def encode(strategies: list[Strategy], L: int, K: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """bounds [N, S + 1], order [N, K], starts [N, S + 1] of N strategies with equal S."""
    bounds = np.array([s.bounds(L) for s in strategies], np.int64)
    order, starts = [], []
    for strategy in strategies:
        used = [k for group in strategy.groups for k in group]
        order.append(used + sorted(set(range(K)) - set(used)))
        starts.append(np.cumsum([0] + [len(group) for group in strategy.groups]))
    return bounds, np.array(order, np.int64), np.array(starts, np.int64)


def decode(bounds: np.ndarray, order: np.ndarray, starts: np.ndarray) -> Strategy:
    """The strategy of one row of `encode`."""
    groups = tuple(tuple(order[starts[s]:starts[s + 1]].tolist()) for s in range(len(starts) - 1))
    return Strategy(tuple(bounds[1:-1].tolist()), groups)


def stage_arrays(problem: Problem, strategy: Strategy) -> StageArrays:
    """What the simulator needs to know of a strategy. Raises InputError where the strategy is not valid."""
    out, _ = _evaluate(problem, strategy)
    return StageArrays(out[FORWARD], out[BACKWARD], out[SEND_FORWARD, :-1], out[SEND_BACKWARD, :-1], out[ALL_REDUCE])


def memory_used(problem: Problem, strategy: Strategy) -> np.ndarray:
    """[K] bytes each device needs at its peak; 0 for unused devices. Raises InputError as `stage_arrays`."""
    return _evaluate(problem, strategy)[1]


def overflow_bytes(problem: Problem, strategy: Strategy) -> float:
    """Bytes over memory, summed over devices; 0 means that the strategy is feasible."""
    return float(np.maximum(memory_used(problem, strategy) - problem.memory_bytes, 0.0).sum())


def fill_memory(problem: Problem, room: float) -> Strategy | None:
    """A strategy with one device a stage that keeps within `room` of every device's memory, or None. It takes the
    devices by falling memory, since the first stages keep the most micro-batches, and fills each stage in turn; None
    does not prove that there is none."""
    S, L = problem.stages, problem.layers
    devices = np.argsort(-problem.memory_bytes, kind="stable")[:S]
    waiting = schedule.in_flight(problem.schedule, S, problem.micro_batches)
    bounds = [0]
    for s, device in enumerate(devices):
        need = np.cumsum(problem.static_bytes[bounds[s]:] + waiting[s] * problem.stash_bytes[bounds[s]:])
        most = int(np.searchsorted(need, problem.memory_bytes[device] * room, side="right"))
        if most == 0:
            return None
        bounds.append(bounds[s] + min(most, L - bounds[s] - (S - s - 1)))  # each later stage needs a layer
    return Strategy(tuple(bounds[1:-1]), tuple((int(device),) for device in devices)) if bounds[S] == L else None


def _evaluate(problem, strategy):
    strategy.check(problem)
    bounds, order, starts = (a[0] for a in encode([strategy], problem.layers, problem.devices))
    out, used, share = np.zeros((5, problem.stages)), np.zeros(problem.devices), np.zeros(problem.devices)
    fill_stage_arrays(pack(problem), bounds, order, starts, out, used, share)
    return out, used


@njit(cache=True)
def fill_stage_arrays(p, bounds, order, starts, out, used, share):
    """Fill out [5, S], used [K] bytes and share [K] (a(k) by position in order); return the bytes over memory."""
    S = bounds.shape[0] - 1
    used[:] = 0.0
    overflow = 0.0
    for s in range(S):
        overflow += fill_stage(p, bounds, order, starts, s, out, used, share)
    for s in range(S - 1):
        fill_sends(p, bounds, order, starts, s, out, share)
    return overflow


@njit(cache=True, error_model="numpy", inline="always")  # a call would copy all of p
def fill_stage(p, bounds, order, starts, s, out, used, share):
    """Compute, all-reduce and memory of one stage; returns its bytes over memory."""
    lo, hi = bounds[s], bounds[s + 1]
    first, last = starts[s], starts[s + 1]
    if last - first == 1:
        k = order[first]
        share[first] = 1.0
        out[FORWARD, s] = p.forward[hi, k] - p.forward[lo, k]
        out[BACKWARD, s] = p.backward[hi, k] - p.backward[lo, k]
        out[ALL_REDUCE, s] = 0.0
    else:
        total = 0.0
        for i in range(first, last):
            k = order[i]
            alone = p.forward[hi, k] - p.forward[lo, k] + p.backward[hi, k] - p.backward[lo, k]
            share[i] = 1.0 / max(alone, 1e-30)  # a stage without work is shared evenly
            total += share[i]
        f = b = slowest = latest = 0.0
        for i in range(first, last):
            k = order[i]
            share[i] /= total
            f = max(f, share[i] * (p.forward[hi, k] - p.forward[lo, k]))
            b = max(b, share[i] * (p.backward[hi, k] - p.backward[lo, k]))
            for j in range(first, last):
                if i != j:
                    slowest = max(slowest, p.s_per_byte[k, order[j]])
                    latest = max(latest, p.latency[k, order[j]])
        n = last - first
        out[FORWARD, s], out[BACKWARD, s] = f, b
        out[ALL_REDUCE, s] = (2.0 * (n - 1) / n * (p.gradient[hi] - p.gradient[lo]) * slowest
                              + 2.0 * (n - 1) * latest)
    static = p.static[hi] - p.static[lo]
    stash = (p.stash[hi] - p.stash[lo]) * p.in_flight[s]
    overflow = 0.0
    for i in range(first, last):
        k = order[i]
        used[k] = static + share[i] * stash
        overflow += max(0.0, used[k] - p.memory[k])
    return overflow


@njit(cache=True, error_model="numpy", inline="always")  # a call would copy all of p
def fill_sends(p, bounds, order, starts, s, out, share):
    """Both transfers over boundary s. A device's sends share its network interface, and so do its receives: the
    transfer takes as long as the busiest sender or receiver."""
    size = p.output[bounds[s + 1] - 1]
    first, middle, last = starts[s], starts[s + 1], starts[s + 2]
    ahead = back = 0.0
    for i in range(first, middle):
        g = order[i]
        sends = receives = 0.0
        for j in range(middle, last):
            h = order[j]
            part = share[i] * share[j] * size
            sends += p.latency[g, h] + part * p.s_per_byte[g, h]
            receives += p.latency[h, g] + part * p.s_per_byte[h, g]
        ahead, back = max(ahead, sends), max(back, receives)
    if middle - first > 1:  # seen from the other side; with one device on this side the loop above says it all
        for j in range(middle, last):
            h = order[j]
            sends = receives = 0.0
            for i in range(first, middle):
                g = order[i]
                part = share[i] * share[j] * size
                receives += p.latency[g, h] + part * p.s_per_byte[g, h]
                sends += p.latency[h, g] + part * p.s_per_byte[h, g]
            ahead, back = max(ahead, receives), max(back, sends)
    out[SEND_FORWARD, s], out[SEND_BACKWARD, s] = ahead, back
