"""Plan search: what a user asks of a cluster, made concrete, and the strategies that the solver finds for it.

Where stages or schedule are left open, every number of stages (beyond EVERY_SIZE a selection) is solved with every
schedule under a small effort, and the best few again under a larger one. Efforts are samples and moves, not seconds:
the same seed gives the same plan.

Symbols: L layers, K devices, S stages, M micro-batches.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from . import cluster as clusters
from . import cost, plan_pins, simulator
from .cluster import Cluster
from .problem import (MAX_MICRO_BATCHES, MAX_VALUE, SCHEDULES, TRANSFERS, InputError, Problem, Strategy,
                      check_choice)
from .schedule import in_flight
from .search import Search, random_state
from .solver import NNPiper, keeps_pins, polishing, with_pins, without_replicas
from .workload import MAX_MICRO_BATCH_SIZE, MODELS, Model, Workload, chain, check_count, find

OBJECTIVES = ("throughput", "latency")
EVERY_SIZE, LARGE_SIZES = 32, 8  # every S up to here, and at most so many beyond, growing geometrically
SCAN, FINAL = (32, 3000), (64, 40_000)  # effort: samples, moves
FINALISTS = 3
SEARCH_OPS = 1 << 12  # S x M while searching: further micro-batches repeat the same pattern
EFFORT_DEVICES = 64  # from which on, as S x M from SEARCH_OPS on, the effort becomes less, as each move takes longer
FEWEST_SAMPLES, FEWEST_MOVES = 4, 300
MEMORY_FIRST = 1e6  # weight of missing memory in the last local search
MAX_STEP_OPS = 1 << 22  # S x M: keeps the exact simulation of a step within memory


@dataclass(frozen=True)
class Request:
    """What is asked of a cluster.

    model: a name in workload.MODELS, a Model, or a Workload (whose micro-batch and recomputation are then its own)
    micro_batches: M of one step
    stages, schedule: None tries all there are
    micro_batch_size: sequences; sequence_length: tokens, None: what the model's publication trains with
    pins: {layer: device}, layers by number or name, devices by number or label; the layer's stage runs there alone
    max_devices: None: all of the cluster; as many as stages: every stage has one device
    objective: "throughput": the shortest step; "latency": the shortest way of one micro-batch through the empty
        pipeline and back (the step of M = 1)

    Raises InputError for values that are valid on no cluster.
    """

    model: str | Model | Workload
    micro_batches: int
    stages: int | None = None
    schedule: str | None = None
    micro_batch_size: int = 1
    sequence_length: int | None = None
    transfers: str = "blocking"
    recompute: bool = False
    pins: Mapping[int | str, int | str] = field(default_factory=dict)
    max_devices: int | None = None
    objective: str = "throughput"

    def __post_init__(self):
        check_count("micro_batches", self.micro_batches, MAX_MICRO_BATCHES)
        check_count("micro_batch_size", self.micro_batch_size, MAX_MICRO_BATCH_SIZE)
        if self.schedule is not None:
            check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("transfers", self.transfers, TRANSFERS)
        check_choice("objective", self.objective, OBJECTIVES)
        if not isinstance(self.pins, Mapping):
            raise InputError(f"pins: {self.pins!r}; allowed: {{layer: device}}")

    def workload(self) -> Workload:
        """The chain of layers. Raises InputError."""
        if isinstance(self.model, Workload):
            return self.model
        return chain(self.model, self.micro_batch_size, self.sequence_length, self.recompute)

    @property
    def tokens(self) -> int | None:
        """Tokens of a sequence; None where a workload is given without its sequence length."""
        if self.sequence_length is not None or isinstance(self.model, Workload):
            return self.sequence_length
        model = self.model if isinstance(self.model, Model) else find(MODELS, "model", self.model)
        return model.sequence_length


@dataclass(frozen=True, eq=False)
class Found:
    """A strategy and how it does: bytes over memory, the objective's time, the step."""

    problem: Problem
    strategy: Strategy
    overflow_bytes: float
    value_s: float
    step_s: float

    @property
    def key(self) -> tuple[float, float, float]:
        """Orders plans, the best first."""
        return self.overflow_bytes, self.value_s, self.step_s

    @property
    def used(self) -> int:
        """Devices that work."""
        return sum(map(len, self.strategy.groups))


@dataclass(frozen=True, eq=False)
class Task:
    """A request made concrete.

    pins: {layer: device} by number; most: how many devices may be used; base: the problem, its stages and schedule
    still to be set
    """

    cluster: Cluster
    request: Request
    workload: Workload
    pins: dict[int, int]
    most: int
    base: Problem
    piper: NNPiper
    seed: int

    @classmethod
    def of(cls, cluster: Cluster, request: Request, piper: NNPiper, seed: int) -> "Task":
        """Raises InputError where the request does not go with the cluster."""
        workload, K = request.workload(), cluster.devices
        if request.max_devices is not None:
            check_count("max_devices", request.max_devices, K)
        most = request.max_devices or K
        pins = plan_pins.numbered(request.pins, workload.layer_names, cluster.labels)
        if len(set(pins.values())) > most:
            raise InputError(f"pins: {len(set(pins.values()))} devices; allowed: at most max_devices = {most}")
        if request.stages is not None:
            _check_stages(request.stages, workload.layers, most, request.micro_batches, pins)
        base = problem_of(workload, cluster, request, 1, SCHEDULES[0])
        return cls(cluster, request, workload, pins, most, base, piper, seed)

    @property
    def schedules(self) -> tuple[str, ...]:
        return SCHEDULES if self.request.schedule is None else (self.request.schedule,)

    def sizes(self) -> list[int]:
        """The numbers of stages that the request leaves open."""
        return self.all_sizes() if self.request.stages is None else [self.request.stages]

    def all_sizes(self) -> list[int]:
        """The numbers of stages that the cluster allows, a selection of the large ones."""
        least, greatest = plan_pins.stages_allowed(self.pins, self.workload.layers)
        top = min(greatest, self.most, MAX_STEP_OPS // self.request.micro_batches)
        large = np.geomspace(EVERY_SIZE, max(top, EVERY_SIZE), LARGE_SIZES + 1).round().astype(int).tolist()
        return sorted(S for S in {*range(1, EVERY_SIZE), *large} if least <= S <= top)

    def search(self, sizes: Iterable[int], final: bool = True) -> tuple[Found, list[Found]]:
        """The best plan over the sizes and all open schedules, and what the scan found, best first."""
        # on one stage all schedules take the same time, and the first keeps the least
        scanned = [self.solve(S, schedule) for S in sizes for schedule in self.schedules[:None if S > 1 else 1]]
        scanned.sort(key=lambda found: found.key)
        finals = [self.solve(found.problem.stages, found.problem.schedule, FINAL)
                  for found in scanned[:FINALISTS] if final]
        return min([*finals, *scanned], key=lambda found: found.key), scanned

    def solve(self, S: int, schedule: str, effort: tuple[int, int] = SCAN, most: int | None = None) -> Found:
        """The best plan found for one number of stages and one schedule, on at most `most` devices."""
        problem = self.base.replace(stages=S, schedule=schedule)
        # a replica works on whole sequences: no more replicas than a micro-batch has
        most = min(most or self.most, S * self.request.micro_batch_size)
        asked = [_fewer_micro_batches(problem)]
        if self.request.objective == "latency":
            # one micro-batch alone; once each stage has to hold what the first one keeps,
            # which is on the safe side, and once what one micro-batch needs; `judge` knows
            waiting = in_flight(schedule, S, asked[0].micro_batches)[0]
            asked += [_keeping(asked[0], waiting, micro_batches=1), asked[0].replace(micro_batches=1)]
        ease = min(1.0, (EFFORT_DEVICES / problem.devices) ** 2)
        samples = max(int(effort[0] * ease), FEWEST_SAMPLES)
        moves = max(int(effort[1] * min(ease, SEARCH_OPS / (S * asked[0].micro_batches))), FEWEST_MOVES)
        found = []
        for one in asked:
            strategy = self.piper.solve(one, seed=self.seed, samples=samples, moves=moves, pins=self.pins,
                                        most_devices=most)
            if not keeps_pins(strategy, problem.layers, self.pins):
                strategy = plan_pins.start(one, self.pins)
            found.append(self.judge(problem, self._trimmed(self._memory_first(one, strategy, most, moves // 2))))
        return min(found, key=lambda found: found.key)

    def _memory_first(self, problem: Problem, strategy: Strategy, most: int, moves: int) -> Strategy:
        """The strategy after a local search that prefers any plan to one that lacks more memory. The solver weighs
        missing memory against time, which may lead it away from the best plans where memories are very unequal."""
        search = Search(with_pins(problem, self.pins) if self.pins else problem, most, MEMORY_FIRST)
        state = tuple(a[0] for a in cost.encode([strategy], problem.layers, problem.devices))
        best, _, _ = search.run(state, moves, polishing(problem), random_state(np.random.default_rng(self.seed)))
        best = without_replicas(cost.decode(*best), problem.layers, self.pins)
        return best if keeps_pins(best, problem.layers, self.pins) else strategy

    def _trimmed(self, strategy: Strategy) -> Strategy:
        """The strategy without the slowest devices of groups that have more than a micro-batch has sequences."""
        speed = 1.0 / (self.base.forward_s + self.base.backward_s).sum(0).clip(1e-30)
        groups = [sorted(group, key=lambda k: -speed[k])[:self.request.micro_batch_size] for group in strategy.groups]
        return Strategy(strategy.cuts, tuple(map(tuple, groups)))

    def judge(self, problem: Problem, strategy: Strategy) -> Found:
        """What the exact simulator and the memory check say."""
        step_s = simulator.step_time(problem, strategy)
        value_s = latency(problem, strategy) if self.request.objective == "latency" else step_s
        return Found(problem, strategy, cost.overflow_bytes(problem, strategy), value_s, step_s)


def problem_of(workload: Workload, cluster: Cluster, request: Request, S: int, schedule: str) -> Problem:
    """The problem of a request with its stages and schedule settled. Raises InputError."""
    idle = [k for k in range(cluster.devices) if not cluster.flops_per_s[k] > 0 and cluster.measured[k] is None]
    if idle:
        raise InputError(f"device {cluster.title(idle[0])}: {cluster.flops_per_s[idle[0]]} FLOP/s; allowed: over 0")
    with np.errstate(all="ignore"):  # what overflows is refused by Problem, which names it
        return clusters.problem(workload, cluster, S, request.micro_batches, schedule, request.transfers)


def latency(problem: Problem, strategy: Strategy) -> float:
    """Time in s of one micro-batch through the empty pipeline and back."""
    return simulator.step_time(problem.replace(micro_batches=1), strategy)


def _fewer_micro_batches(problem):
    """The same problem to search on with so few micro-batches that a step is simulated fast; plans need the same
    memory. In the steps left out every stage repeats what it does."""
    S, M = problem.stages, problem.micro_batches
    few = min(M, max(SEARCH_OPS // S, 4 * S))
    if few == M:
        return problem
    return _keeping(problem, M / few if problem.schedule == "gpipe" else 1.0, micro_batches=few)


def _keeping(problem, times, **changes):
    """The problem with activations `times` as large, and other changes."""
    return problem.replace(stash_bytes=np.minimum(problem.stash_bytes * times, MAX_VALUE), **changes)


def _check_stages(S, L, most, M, pins):
    least, greatest = plan_pins.stages_allowed(pins, L)
    greatest = min(greatest, most)
    if isinstance(S, bool) or not isinstance(S, (int, np.integer)) or not least <= S <= greatest:
        raise InputError(f"stages: {S!r}; allowed: an integer from {least} to {greatest}, with {L} layers and {most} "
                         f"devices{' and these pins' if pins else ''}")
    if S * M > MAX_STEP_OPS:
        raise InputError(f"stages: {S} with {M} micro-batches; allowed: a product of at most {MAX_STEP_OPS}")
