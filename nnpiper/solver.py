"""The solver: network -> samples -> polish on the exact simulator -> Strategy, within a time budget.

The network draws a few dozen strategies, the simulator ranks them, and a short local search polishes the best ones.
"""

import math
import time
from pathlib import Path

import numpy as np

from . import checkpoint, cost, memory, simulator
from .batch import Batch
from .compiled import Compiled
from .cooling import chunks, temperatures
from .network import Network
from .problem import MAX_VALUE, InputError, Problem, Strategy
from .search import Search, best_of, device_speed, random_state
from .starts import plain_starts

SAMPLES = 64  # groupings
SAMPLES_ALONE = 128  # without polish
DIVISIONS = 4  # of the layers, for each grouping
MOVES = 6000  # of polish without a budget
# As many states are polished as the square root of the moves over STARTING x K^2, at least FEWEST_MOVES: both how many
# there are and how many moves each gets grow with the budget
STARTING, FEWEST_MOVES = 1.0, 250
AGAIN = 0.5  # times the first temperature, when the best end is annealed again; 0.3 to 2 were tried
PLAIN = 3  # one in so many is a plain start, as long as there are any: the best samples may all lie in one valley
CHUNK = 500  # moves between two looks at the clock; fewer where one simulation takes long
CHUNK_OPS = 1 << 21  # that a chunk simulates at most, a few milliseconds
SAMPLING_PART = 0.25  # of a budget; large problems get fewer samples, at least FEWEST
FEWEST = 4
WORTH = 4  # times what FEWEST samples take: in a smaller budget a plain start is polished for the whole of it
# Temperatures of the polish, as `cooling.temperatures` takes them (twice and half of HOT were tried at K = 16, 32 and
# 64; HOT_ALONE and how far it falls at K = 12, 16 and 32)
HOT, HOTTEST, HOT_ALONE, COLD = 0.4, 0.4 / 12, 27.0, 0.0005
HOT_TIGHT = 0.06  # where no plan fits, or only one that fills the devices by falling memory, which has to be left
HOPELESS = 1.25  # times the step of the best start: no polish for such a one


class NNPiper:
    """A trained network that solves problems.

    >>> piper = NNPiper.from_pretrained()            # doctest: +SKIP
    >>> print(piper.solve(problem, budget_s=0.02))   # doctest: +SKIP
    """

    def __init__(self, network: Network):
        self.network = network
        self._compiled = Compiled(network)

    @classmethod
    def from_pretrained(cls, path: Path | None = None) -> "NNPiper":
        """The solver of a checkpoint; None: the shipped one. Raises InputError where it cannot be read or is not what
        its card says."""
        return cls(checkpoint.load(path))

    def solve(self, problem: Problem, budget_s: float | None = None, seed: int = 0, polish: bool = True,
              samples: int | None = None, moves: int = MOVES, pins: dict[int, int] | None = None,
              most_devices: int | None = None) -> Strategy:
        """The best strategy found: feasible if any feasible one was met, else the one with the least bytes over memory.

        With budget_s the polish goes on until that many seconds have gone since the call, fewer samples are drawn where
        all of them would use it up, and none where even a few would; without, it makes `moves` moves, and the same seed
        gives the same strategy.
        Without polish: the best of the network's samples. Where nothing drawn fits, nor a plain start, the plan that
        fills the devices by falling memory joins them.

        pins {layer: device}: the stage with this layer shall run on this device alone. They are wishes that cost much
        to break: `keeps_pins` says whether a strategy keeps them all. most_devices: no more are used. Raises
        InputError.
        """
        begin = time.perf_counter()
        if budget_s is not None and not 0 < budget_s < math.inf:
            raise InputError(f"budget_s: {budget_s}; allowed: a positive, finite number of seconds")
        check_wishes(problem, pins, most_devices)
        most = most_devices or problem.devices
        samples = samples or (SAMPLES if polish else SAMPLES_ALONE)
        if budget_s is not None:
            samples = min(samples, _affordable(problem, budget_s, polish))
        rng = np.random.default_rng(seed)
        parts = [self.sample(problem, samples, seed)] if samples else []
        if polish and not (pins and samples):  # of pins plain starts know nothing
            parts.append(plain_starts(problem, rng))
        states, step_s, overflow = _joined(parts)
        if pins or most < problem.devices:
            problem = with_pins(problem, pins or {})
            _leave_out(problem, states, most)
            step_s, overflow = simulator.step_times(problem, *states)
            memory.fit(problem, states, step_s, overflow)
        tight = overflow.min() > 0
        if tight:
            states, step_s, overflow = _joined([(states, step_s, overflow), *_memory_plan(problem)])
        order = np.lexsort((step_s, overflow))
        if not polish:
            return cost.decode(*(a[order[0]] for a in states))
        deadline = begin + budget_s if budget_s else None
        count = _startable(problem, moves if deadline is None else _moves_in(problem, deadline - time.perf_counter()))
        chosen = _distinct(step_s, order, count - count // PLAIN)
        not_drawn = order[order >= samples * DIVISIONS]
        chosen = _distinct(step_s, [*chosen, *not_drawn, *order], count)
        starts = [tuple(a[n].copy() for a in states) for n in chosen if step_s[n] <= HOPELESS * step_s[chosen[0]]]
        span = (HOT_TIGHT, COLD) if tight else polishing(problem)
        best = _polish(Search(problem, most), starts, span, moves, deadline, rng)
        return without_replicas(cost.decode(*best), problem.layers, pins or {})

    def sample(self, problem: Problem, samples: int, seed: int):
        """`samples` groupings with DIVISIONS divisions each, as `cost.encode` writes strategies, their steps in s and
        bytes over memory; number 0 is the network's likeliest."""
        batch, rng = Batch.of([problem]), np.random.default_rng(seed)
        actions, mean, sigma = self._compiled.draw(self.network.features(batch), samples, random_state(rng))
        noise = rng.standard_normal((1, samples, DIVISIONS, problem.stages))
        noise[:, :, 0] = 0.0
        share = np.exp(mean[:, :, None] + sigma[:, :, None] * noise)
        states = batch.strategies(actions, share / share.sum(-1, keepdims=True))
        step_s, overflow = (a[0] for a in batch.step_times(*states))
        states = tuple(a[0] for a in states)
        memory.fit(problem, states, step_s, overflow)
        return states, step_s, overflow


def check_wishes(problem: Problem, pins: dict[int, int] | None, most_devices: int | None) -> None:
    """Raise InputError unless the pins name layers and devices of the problem and most_devices leaves one a stage."""
    L, K, S = problem.layers, problem.devices, problem.stages
    for layer, device in (pins or {}).items():
        if not (0 <= layer < L and 0 <= device < K):
            raise InputError(f"pins: layer {layer} on device {device}; "
                             f"allowed: layers 0 to {L - 1}, devices 0 to {K - 1}")
    if most_devices is not None and not S <= most_devices:
        raise InputError(f"most_devices: {most_devices}; allowed: at least the number of stages, {S}")


def keeps_pins(strategy: Strategy, layers: int, pins: dict[int, int]) -> bool:
    """Whether the stage of each pinned layer runs on the layer's device alone."""
    return all(strategy.groups[_stage_of(strategy, layers, layer)] == (device,) for layer, device in pins.items())


def _stage_of(strategy, layers, layer):
    return int(np.searchsorted(strategy.bounds(layers), layer, side="right")) - 1


def with_pins(problem: Problem, pins: dict[int, int]) -> Problem:
    """The problem with pinned layers ten times as slow, on any other device, as the whole model on the slowest one."""
    forward_s = problem.forward_s.copy()
    slow = min(10.0 * (problem.forward_s + problem.backward_s).sum(0).max() + 1e-3, MAX_VALUE)
    for layer, device in pins.items():
        forward_s[layer, np.arange(problem.devices) != device] = slow
    return problem.replace(forward_s=forward_s)


def without_replicas(strategy: Strategy, layers: int, pins: dict[int, int]) -> Strategy:
    """The strategy without the replicas that are of no use to a pinned layer's stage."""
    groups = list(strategy.groups)
    for layer, device in pins.items():
        s = _stage_of(strategy, layers, layer)
        if device in groups[s]:
            groups[s] = (device,)
    return Strategy(strategy.cuts, tuple(groups))


def polishing(problem: Problem) -> tuple[float, float]:
    """The first and the last temperature with which good plans of this problem are polished."""
    return temperatures(problem, HOT, HOTTEST, HOT_ALONE, COLD)


def _leave_out(problem, states, most_devices):
    """Take the slowest devices out of groups of several, in place, until no more than most_devices are used."""
    speed = device_speed(problem.forward_s + problem.backward_s)
    _, orders, all_starts = states
    for order, starts in zip(orders, all_starts):
        while starts[-1] > most_devices:
            sizes = np.diff(starts)
            spare = [i for s in np.flatnonzero(sizes > 1) for i in range(starts[s], starts[s + 1])]
            i = min(spare, key=lambda i: speed[order[i]])
            order[:] = np.append(np.delete(order, i), order[i])
            starts[starts > i] -= 1


def _affordable(problem, budget_s, polish):
    """How many samples fit into their part of the budget, 0 where polish makes more of it: fitted to what one core of a
    server took, K, S <= 64, L <= 500."""
    K, S = problem.devices, problem.stages
    fixed_ms = 0.35 + 0.012 * K + 3e-4 * K * K
    each_ms = (0.005 + 0.002 * K + 0.003 * S + 6e-5 * S * S + 3.5e-5 * S * problem.micro_batches
               + 7e-5 * problem.layers)
    if polish and 1e3 * budget_s < WORTH * (fixed_ms + FEWEST * each_ms):
        return 0
    part = SAMPLING_PART if polish else 0.8
    return max(int(min((1e3 * part * budget_s - fixed_ms) / each_ms, 1e6)), FEWEST)


def _memory_plan(problem):
    """Nothing, or the plan of `cost.fill_memory` with the most room left, as `NNPiper.sample` returns samples."""
    plan = next(filter(None, (cost.fill_memory(problem, room) for room in (0.8, 0.9, 0.95, 1.0))), None)
    if plan is None:
        return []
    states = cost.encode([plan], problem.layers, problem.devices)
    return [(states, *simulator.step_times(problem, *states))]


def _joined(parts):
    """Several of what `NNPiper.sample` returns, as one."""
    states, *rest = zip(*parts)
    return tuple(map(np.concatenate, zip(*states))), *map(np.concatenate, rest)


def _moves_in(problem, seconds):
    """How many moves fit into so much time: one takes about 0.4 us, and one in four is simulated."""
    return seconds / (4e-7 + 0.25 * 1.5e-9 * 2 * problem.stages * problem.micro_batches)


def _startable(problem, moves):
    """How many states so many moves can polish."""
    return max(int((max(moves, 0) / max(STARTING * problem.devices**2, FEWEST_MOVES)) ** 0.5), 1)


def _distinct(step_s, order, count):
    """The first `count` in this order with different steps: equal steps are nearly always the same strategy twice."""
    chosen = []
    for n in order:
        if len(chosen) < count and all(step_s[n] != step_s[other] for other in chosen):
            chosen.append(n)
    return chosen


def _polish(search, starts, span, moves, deadline, rng):
    """Anneal from each start for an equal part of the moves (or of the time), from the first to the last temperature of
    the span; of several starts for half of all, and from the best end for the other half, less hot."""
    seed, coldest = random_state(rng), span[1]
    chunk = max(min(CHUNK, CHUNK_OPS // len(search.ops)), 1)
    first = 1.0 if len(starts) == 1 else 0.5

    def anneal(state, hot, part, end):
        steps = [((hot, coldest), int(part * moves))] if deadline is None else chunks(hot, coldest, end, chunk)
        return search.anneal(state, steps, seed)

    begin, end = time.perf_counter(), math.inf if deadline is None else deadline
    middle, found = begin + first * (end - begin), []
    for i, state in enumerate(starts):
        now = time.perf_counter()
        found.append(anneal(state, span[0], first / len(starts), now + (middle - now) / (len(starts) - i)))
    if first < 1.0:
        found.append(anneal(tuple(part.copy() for part in best_of(found)[0]), AGAIN * span[0], 1.0 - first, end))
    return best_of(found)[0]
