"""Local search over strategies on the exact simulator: one compiled loop serves annealing and the solver's polish.

A state is a strategy as `cost.encode` writes it (bounds, order, starts). A move is accepted when the new energy is
below a threshold that is drawn beforehand (Metropolis: current energy - temperature log u), so that most moves are
refused by lower bounds of their step alone, without a simulation: the cheap one first, then the longest path of known
length, which refuses nine in ten of those that the simulation would refuse; under GPipe the bound is the step. Energy =
step time x (1 + OVERFLOW_WEIGHT x overflow / mean memory of a device); the best state is the feasible one with the
shortest step, or the one with the least overflow. Temperatures are relative to the energy.
"""

import math

import numpy as np
from numba import njit

from . import cost, simulator
from .cost import BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD
from .critical_path import label_parts, longest_path
from .moves import move
from .problem import Problem
from .simulator import run_step, step_bound
from .xorshift import uniform

OVERFLOW_WEIGHT = 10.0
ROUNDING = 1e-12  # by which a bound may be above its step


class Search:
    """The search's view of one problem: packed costs, op table and scratch, made once."""

    def __init__(self, problem: Problem, most_devices: int | None = None, overflow_weight: float = OVERFLOW_WEIGHT):
        """With most_devices, no move uses more devices than that."""
        S, M, K = problem.stages, problem.micro_batches, problem.devices
        self.packed = cost.pack(problem)
        self.ops = simulator.op_table(problem.schedule, S, M)
        self.rules = problem.transfers == "blocking", problem.schedule == "1f1b", M
        self.most_devices = K if most_devices is None else most_devices
        self.overflow_weight = overflow_weight
        self.space = simulator.workspace(S, M)
        costs = [np.zeros(shape) for _ in range(2) for shape in ((5, S), K, S)]
        self.scratch = (*costs, np.zeros(K), np.zeros(S, np.int64), np.zeros(S, np.bool_),
                        device_speed(problem.forward_s + problem.backward_s),
                        np.zeros(label_parts(*self.rules[:2])))

    def run(self, state, moves: int, temperature: tuple[float, float], random_state: np.ndarray):
        """`moves` moves from `state` (bounds, order, starts), temperature falling geometrically from the first to the
        second value (0: descent). random_state is [1] uint64, not 0, and advances. The state is changed in place to
        the last one; returns (best state, its step in s, its bytes over memory)."""
        best = tuple(a.copy() for a in state)
        step, overflow = _search(self.packed, self.ops, *self.rules, *state, *best, moves, *temperature, random_state,
                                 self.space, self.scratch, self.most_devices, self.overflow_weight)
        return best, step, overflow

    def anneal(self, state, chunks, random_state: np.ndarray):
        """`run` for each of the chunks ((first temperature, last), moves) in turn, from where the one before ended;
        returns the best of all as `run` does, or the state, with infinite step and bytes, where there is no chunk."""
        best, best_step, best_overflow = state, np.inf, np.inf
        for temperature, moves in chunks:
            found, step, overflow = self.run(state, moves, temperature, random_state)
            if better(step, overflow, best_step, best_overflow):
                best, best_step, best_overflow = found, step, overflow
        return best, best_step, best_overflow


def random_state(rng: np.random.Generator) -> np.ndarray:
    """Seed of the compiled generator."""
    return rng.integers(1, 2**63, size=1, dtype=np.uint64)


def better(step, overflow, best_step, best_overflow) -> bool:
    """Feasible before infeasible, less overflow among the infeasible, then the shorter step."""
    return (overflow, step) < (best_overflow, best_step)


def best_of(ends: list[tuple]) -> tuple:
    """The best of what several `Search.run` returned, in the order of `better`; the first of equal ones."""
    return min(ends, key=lambda end: (end[2], end[1]))


def restarts(problem: Problem, runs: int, moves: int, temperature: tuple[float, float], rng: np.random.Generator):
    """The best of so many annealing runs, each from the proportional state of the devices in random order, as
    `Search.run` returns it."""
    search = Search(problem)
    return best_of([search.run(proportional_state(problem, rng.permutation(problem.devices)), moves, temperature,
                               random_state(rng)) for _ in range(runs)])


def proportional_state(problem: Problem, devices: np.ndarray, used: int | None = None):
    """A plain start: the devices in the given order, or the first `used` of them, dealt evenly to the stages, and
    layers in proportion to the speed of each group."""
    return tuple(part[0] for part in proportional_states(problem, devices[None], [used or problem.devices]))


def proportional_states(problem: Problem, orders: np.ndarray, used: list[int]):
    """(bounds, order, starts) [N, ...] of the proportional states of N orders [N, K] on the first used [N] devices."""
    starts = np.round(np.linspace(0, used, problem.stages + 1, axis=-1)).astype(np.int64, order="C")
    layer_s = problem.forward_s + problem.backward_s  # [L, K]
    place = np.arange(problem.devices)
    speed = np.where(place < starts[:, -1:], device_speed(layer_s)[orders], 0.0)
    first = starts[:, :-1] + problem.devices * np.arange(len(orders))[:, None]  # in the flattened speeds
    share = np.add.reduceat(speed.ravel(), first.ravel()).reshape(first.shape)
    bounds = cuts_by_share(layer_work(layer_s), share / share.sum(axis=1, keepdims=True))
    return bounds, orders.astype(np.int64), starts


def device_speed(layer_s: np.ndarray) -> np.ndarray:
    """[..., K] models a second that each device could do alone, from [..., L, K] seconds."""
    return 1.0 / np.maximum(layer_s.sum(axis=-2), 1e-30)


def layer_work(layer_s: np.ndarray) -> np.ndarray:
    """[..., L] share of each layer in the work, mean over devices, from [..., L, K] seconds."""
    total = np.maximum(layer_s.sum(axis=-2, keepdims=True), 1e-30)
    work = (layer_s / total).mean(axis=-1) + 1e-12
    return work / work.sum(axis=-1, keepdims=True)


@njit(cache=True, error_model="numpy")
def cuts_by_share(work, share):
    """[N, S + 1] bounds for wanted shares [N, S] of the work [L]: bisection over the greatest work / share that a stage
    may have, stages filled in turn. The least such ratio where no stage is cut to the one layer that each must get."""
    N, S = share.shape
    bounds = np.zeros((N, S + 1), np.int64)
    for n in range(N):
        low, high = 0.0, 1.0
        while not _fill(work, share[n], high, bounds[n]):
            low, high = high, 2.0 * high
        for _ in range(8):
            middle = 0.5 * (low + high)
            if _fill(work, share[n], middle, bounds[n]):
                high = middle
            else:
                low = middle
        _fill(work, share[n], high, bounds[n])
    return bounds


@njit(cache=True, error_model="numpy")
def _fill(work, share, ratio, bounds):
    """Give each stage in turn the layers that fit into ratio x share; False if some are left over."""
    L, S = work.shape[0], share.shape[0]
    total = share.sum()
    layer = 0
    for s in range(S):
        part = share[s] / total
        room = ratio * (part if part > 1e-9 else 1e-9)  # also where it is no number
        last = L - (S - 1 - s)  # each later stage needs a layer
        taken = work[layer]
        layer += 1
        while layer < last and taken + work[layer] <= room:
            taken += work[layer]
            layer += 1
        if taken > room:
            return False
        bounds[s + 1] = layer
    return layer == L


@njit(cache=True, error_model="numpy")
def _search(p, ops, blocking, one_f_one_b, M, bounds, order, starts, best_bounds, best_order, best_starts,
            moves, hot, cold, random, space, scratch, most, overflow_weight):
    # the current state's costs, and those of its neighbour: equal but for the stages that a move changes
    stages, share, over, new_stages, new_share, new_over, used, plan, stale, speed, nothing = scratch
    S = starts.shape[0] - 1
    memory = p.memory.mean() + 1.0
    groups = order.shape[0] > S
    new_bounds, new_order, new_starts = bounds.copy(), order.copy(), starts.copy()

    overflow = 0.0
    for s in range(S):
        over[s] = cost.fill_stage(p, bounds, order, starts, s, stages, used, share)
        overflow += over[s]
    for s in range(S - 1):
        cost.fill_sends(p, bounds, order, starts, s, stages, share)
    _copy_costs(stages, share, over, new_stages, new_share, new_over)
    step = run_step(ops, stages, blocking, space)
    energy = step * (1.0 + overflow_weight * overflow / memory)
    best_step, best_overflow = step, overflow
    slowest = _slowest(stages, blocking)
    cooling = (cold / hot) ** (1.0 / max(moves, 1)) if hot > 0.0 else 0.0
    temperature = hot
    for _ in range(moves):
        if not move(bounds, order, starts, new_bounds, new_order, new_starts, slowest, random, plan, speed,
                    p.s_per_byte, most):
            temperature *= cooling
            continue
        threshold = energy * (1.0 - temperature * math.log(uniform(random)))
        most_bound = threshold * (1.0 + ROUNDING) if one_f_one_b else threshold
        temperature *= cooling
        new_overflow = _update_stages(p, bounds, order, starts, new_bounds, new_order, new_starts, new_stages,
                                      new_share, new_over, used, stale)
        weight = 1.0 + overflow_weight * new_overflow / memory
        # in large groups transfers take longest to work out, and half of the moves are refused without them
        accepted = not groups or step_bound(new_stages, M, blocking, one_f_one_b) * weight <= most_bound
        if accepted:
            for s in range(S - 1):
                if stale[s]:
                    cost.fill_sends(p, new_bounds, new_order, new_starts, s, new_stages, new_share)
            new_step = step_bound(new_stages, M, blocking, one_f_one_b)
            accepted = new_step * weight <= most_bound
        if accepted and one_f_one_b:
            path = longest_path(new_stages, S - 1, 0.0, 0.0, M, blocking, one_f_one_b, nothing)
            accepted = path * weight <= most_bound
        if accepted and one_f_one_b:
            new_step = run_step(ops, new_stages, blocking, space)
            accepted = new_step * weight <= threshold
        if accepted:
            step, overflow, energy = new_step, new_overflow, new_step * weight
            _copy_state(new_bounds, new_order, new_starts, bounds, order, starts)
            _copy_costs(new_stages, new_share, new_over, stages, share, over)
            slowest = _slowest(stages, blocking)
            if overflow < best_overflow or (overflow == best_overflow and step < best_step):
                best_step, best_overflow = step, overflow
                _copy_state(bounds, order, starts, best_bounds, best_order, best_starts)
        else:
            _copy_state(bounds, order, starts, new_bounds, new_order, new_starts)
            _copy_costs(stages, share, over, new_stages, new_share, new_over)
    return best_step, best_overflow


@njit(cache=True, error_model="numpy", inline="always")
def _update_stages(p, bounds, order, starts, new_bounds, new_order, new_starts, stages, share, over, used, stale):
    """Bring the neighbour's stages up to date where it differs from the state; the transfers that are to be worked out
    again are stale [S] and 0 until then. Returns its bytes over memory."""
    S = starts.shape[0] - 1
    overflow = 0.0
    changed_before = False
    for s in range(S):
        changed = (bounds[s] != new_bounds[s] or bounds[s + 1] != new_bounds[s + 1]
                   or starts[s] != new_starts[s] or starts[s + 1] != new_starts[s + 1])
        if not changed:
            for i in range(starts[s], starts[s + 1]):
                changed = changed or order[i] != new_order[i]
        if changed:
            over[s] = cost.fill_stage(p, new_bounds, new_order, new_starts, s, stages, used, share)
        if s > 0:
            stale[s - 1] = changed or changed_before
            if stale[s - 1]:
                stages[SEND_FORWARD, s - 1] = stages[SEND_BACKWARD, s - 1] = 0.0
        changed_before = changed
        overflow += over[s]
    return overflow


@njit(cache=True, error_model="numpy", inline="always")
def _copy(source, target):
    """A plain loop: a slice assignment costs several times as much on arrays this short."""
    for i in range(source.shape[0]):
        target[i] = source[i]


@njit(cache=True, error_model="numpy", inline="always")
def _copy_state(bounds, order, starts, to_bounds, to_order, to_starts):
    _copy(bounds, to_bounds)
    _copy(order, to_order)
    _copy(starts, to_starts)


@njit(cache=True, error_model="numpy", inline="always")
def _copy_costs(stages, share, over, to_stages, to_share, to_over):
    for i in range(stages.shape[0]):
        for s in range(stages.shape[1]):
            to_stages[i, s] = stages[i, s]
    _copy(share, to_share)
    _copy(over, to_over)


@njit(cache=True, error_model="numpy")
def _slowest(stages, blocking):
    """The stage that is busy longest a micro-batch: where a move most likely helps."""
    worst, where = -1.0, 0
    for s in range(stages.shape[1]):
        busy = stages[FORWARD, s] + stages[BACKWARD, s]
        if blocking:
            busy += stages[SEND_FORWARD, s]
            if s > 0:
                busy += stages[SEND_BACKWARD, s - 1]
        if busy > worst:
            worst, where = busy, s
    return where
