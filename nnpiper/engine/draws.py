"""What is run on the emulated cluster: random strategies by seed, and the planners' strategies on scaled problems.

Symbols: S stages, M micro-batches, F(s), B(s), C(s) = F(s) + B(s), c a transfer one way.
"""

from dataclasses import dataclass

import numpy as np

from .. import cost, experiments, simulator
from ..baselines import PLANNERS, PlannerLimit
from ..problem import SCHEDULES, Problem, Strategy
from .emulator import Job

SEED = 13
SLOWEST, FASTEST = 50e6 / 8, 2e9 / 8  # bytes per second of a link
LINKS = ("pair", "one-way")  # both directions of a pair alike, as in our environments; or each drawn by itself
DRAWS = 40
CLUSTERS = ("completely_heterogeneous", "realistic")  # the second: nodes of equal devices
SIZES = ((4, 4), (5, 4), (6, 6))  # (K, S)
MODELS = ("gpt2-medium", "gpt2-xl")
MIN_BYTES = 4  # one float32


@dataclass(frozen=True)
class Draw:
    """One random strategy. links: one of LINKS; ratio: mean transfer over mean C(s)."""

    number: int
    links: str
    ratio: float
    job: Job


def strategies(count: int = DRAWS) -> list[Draw]:
    """The first `count` of 40 random strategies: 10 of each schedule and kind of links, S from 2 to 6 twice in each;
    ratio 0 to 1 in equal steps, in random order; M from S to 24; C(s) spread by a factor of up to e^1.4, B half to
    three quarters of it; links log-uniform; one activation size."""
    rng = np.random.default_rng(SEED)
    ratios = [rng.permutation(np.linspace(0.0, 1.0, 10)) for _ in range(4)]
    draws = []
    for number in range(DRAWS):
        kind, place = number % 4, number // 4
        S = 2 + place % 5
        M = int(rng.integers(S, 25))
        work = np.exp(rng.uniform(-0.7, 0.7, S))
        backward = rng.uniform(0.5, 0.75, S) * work
        ahead, back = np.exp(rng.uniform(np.log(SLOWEST), np.log(FASTEST), (2, S - 1)))
        if LINKS[kind // 2] == "pair":
            back = ahead
        draws.append(Draw(number, LINKS[kind // 2], float(ratios[kind][place]), scaled_job(
            SCHEDULES[kind % 2], M, work - backward, backward, ahead, back, ratios[kind][place])))
    return draws[:count]


def scaled_job(schedule: str, M: int, forward, backward, ahead, back, ratio: float) -> Job:
    """A job with the proportions of forward, backward [S], its links as they are, its time scaled so that a step of
    blocking transfers takes 0.2 s and 20 ms a micro-batch on its way: long against the engine's own overhead."""
    S = len(forward)
    work, per_byte = (forward + backward).mean(), np.concatenate([1 / ahead, 1 / back]).mean()
    size = ratio * work / per_byte  # bytes, for times as given
    unscaled = cost.StageArrays(forward, backward, size / ahead, size / back, np.zeros(S))
    scale = (0.2 + 0.02 * (M + S - 1)) / simulator.simulate(unscaled, schedule, M, "blocking")
    return Job(schedule, M, (scale * forward).tolist(), (scale * backward).tolist(), [0.0] * S,
               [whole_bytes(scale * size)] * (S - 1), ahead.tolist(), back.tolist())


def whole_bytes(size: float) -> int:
    """A size as whole float32 numbers, at least one."""
    return max(MIN_BYTES, 4 * round(size / 4))


def cases(smoke: bool = False) -> list[experiments.Case]:
    """12 problems: two models in two environments at three sizes, with two micro-batches a stage, so that operations
    are long. smoke: the first."""
    every = [experiments.Case(model, environment, K, S, 0, micro_batches=2 * S)
             for K, S in SIZES for environment in CLUSTERS for model in MODELS]
    return every[:1] if smoke else every


def plans(problem: Problem, checkpoint) -> dict[str, Strategy]:
    """The strategy of every planner that takes the problem, NNPiper's first."""
    found = {"nnpiper": experiments.piper(checkpoint).solve(problem)}
    for name, solve in PLANNERS.items():
        try:
            found[name] = solve(problem)
        except PlannerLimit:
            continue
    return found


def emulated_problem(problem: Problem, time_scale: float, latency_s: float) -> Problem:
    """The problem with all times longer by `time_scale`, on links that the emulated cluster has: bandwidths lowered by
    one factor, so that the fastest link reaches FASTEST, or the slowest SLOWEST if that is higher (then what is faster
    than FASTEST is cut to it), bytes with them, and the measured latency everywhere."""
    rate = problem.bandwidth_bytes_per_s
    links = rate[~np.eye(problem.devices, dtype=bool)]
    factor = max(FASTEST / links.max(), SLOWEST / links.min())
    size = factor * time_scale
    return problem.replace(
        forward_s=problem.forward_s * time_scale, backward_s=problem.backward_s * time_scale,
        output_bytes=problem.output_bytes * size, gradient_bytes=problem.gradient_bytes * size,
        bandwidth_bytes_per_s=np.minimum(rate * factor, FASTEST), latency_s=np.full(rate.shape, latency_s))


def link_spread(case: experiments.Case) -> float:
    """Fastest over slowest link of a case's emulated cluster."""
    rate = emulated_problem(case.problem(), 1.0, 0.0).bandwidth_bytes_per_s
    links = rate[~np.eye(len(rate), dtype=bool)]
    return float(links.max() / links.min())


def strategy_job(problem: Problem, strategy: Strategy, latency_s: float) -> Job:
    """A strategy of an emulated problem (whose links have this latency) as a job. A group of devices is one process
    with the group's F, B, c and all-reduce as the cost model gives them: its boundary has the bandwidth that makes c,
    and its all-reduce is slept. So the engine tests the schedule there, not the formula for groups."""
    stages, bounds = cost.stage_arrays(problem, strategy), strategy.bounds(problem.layers)
    size = [whole_bytes(problem.output_bytes[cut - 1]) for cut in bounds[1:-1]]
    ahead, back = (np.array(size) / np.maximum(send - latency_s, 1e-9)
                   for send in (stages.send_forward_s, stages.send_backward_s))
    return Job(problem.schedule, problem.micro_batches, stages.forward_s.tolist(), stages.backward_s.tolist(),
               stages.all_reduce_s.tolist(), size, ahead.tolist(), back.tolist())
