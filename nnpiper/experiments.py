"""Experiments: seeded problem sets, the planners run on them, one row for every plan.

A *case* is one random problem, named by its fields and a number: the same case is the same problem on every machine and
in every notebook. Rows are plain dicts, so that they make a DataFrame. NNPiper runs without a time budget, with a
fixed number of samples and moves and seed 0, so that its plans do not depend on the machine's speed. Nothing here
reads a wall time but `solve_times`.

Symbols: L layers, K devices, S stages, M micro-batches.
"""

import dataclasses
import multiprocessing
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np

from . import baselines, closed_form, cost, simulator, virtual
from .baselines import PLANNERS, PlannerLimit
from .cluster import ENVIRONMENTS, sample_problem
from .problem import SHAPES, TRANSFERS, Problem, Strategy
from .provenance import usable_cores
from .solver import MOVES, NNPiper
from .workload import MODELS

SEED = 2025
GPT_MODELS = ("gpt2-medium", "gpt2-xl", "gpt3-1.3b", "gpt3-6.7b")
OTHER_MODELS = ("bert-large", "llama2-7b", "llama3-8b", "t5-large")

REFERENCE = "alpa-hetero"  # knows every device and link, keeps the given device order; the claims are judged against it
DYNAMIC_PROGRAMS = ("pipedream", "piper", "alpa", "alpa-hetero", "amp", "pipeedge")
SORTED = "alpa-hetero sorted"
COMPARED = ("even", *DYNAMIC_PROGRAMS, "metis", SORTED)

MAX_WORKERS = 2  # what the promised minutes are for
CASES_A_WORKER = 16  # a process takes seconds to start: fewer cases are not worth one

# Wider than anything in training (virtual.Ranges), up to twice as wide: speeds up to e^4 either way, links e^4.6
WIDE = virtual.Ranges(speed_spread=(2.0, 4.0), link_spread=(2.3, 4.6))


@dataclasses.dataclass(frozen=True)
class Case:
    """One random problem.

    environment: a name in ENVIRONMENTS; or "virtual", an instance as in training, or "virtual wide", from WIDE (for
        both, `model` is only a name and `layers` counts all layers)
    micro_batches: 4 S unless given; layers: blocks of the model, its own number unless given
    """

    model: str
    environment: str
    devices: int
    stages: int
    number: int
    micro_batches: int | None = None
    layers: int | None = None
    schedule: str = "1f1b"

    def problem(self) -> Problem:
        """The problem, transfers blocking; on a cluster it has a feasible strategy (see `cluster.sample_problem`)."""
        rng = np.random.default_rng([SEED, zlib.crc32(repr(self).encode())])
        if self.environment not in ENVIRONMENTS:
            ranges = WIDE if self.environment == "virtual wide" else virtual.Ranges()
            return virtual.draw(rng, 1, self.devices, self.stages, self.layers, self.micro_batches or 4 * self.stages,
                                self.schedule, "blocking", ranges).problem(0)
        model = self.model
        if self.layers is not None:
            model = dataclasses.replace(MODELS[model], name=f"{model}, {self.layers} blocks", layers=self.layers)
        return sample_problem(rng, model, self.environment, self.devices, self.stages, self.schedule,
                              micro_batches=self.micro_batches)

    @property
    def fields(self) -> dict:
        """What names the case in a table."""
        names = ("model", "environment", "devices", "stages", "number")
        return {name: getattr(self, name) for name in names}


def cases(models: Iterable[str], environments: Iterable[str], sizes: Iterable[tuple[int, int]], count: int,
          **more) -> list[Case]:
    """`count` cases for each model, environment and size (K, S)."""
    return [Case(model, environment, K, S, number, **more) for model in models for environment in environments
            for K, S in sizes for number in range(count)]


def each(function: Callable, items: list, least: int = CASES_A_WORKER, workers: int | None = None) -> Iterator:
    """function(item) in the order of the items, in as many processes as there are cores (at most MAX_WORKERS, and each
    with `least` items or more) or as `workers` says.

    Every process has one thread, this one too: so the results do not depend on the number of processes. `function`
    must be importable (a notebook's own functions are not).
    """
    workers = min(MAX_WORKERS, usable_cores(), len(items) // least) if workers is None else workers
    if workers <= 1:
        _one_thread()
        yield from map(function, items)
        return
    start = multiprocessing.get_context("spawn")  # a fork would copy the locks of torch's and the kernel's threads
    with ProcessPoolExecutor(workers, start, _start_worker) as pool:
        yield from pool.map(function, items, chunksize=1)


def judge(problem: Problem, strategy: Strategy) -> dict:
    """What the exact simulator and the memory check say of a plan. Raises InputError where it is no valid strategy."""
    return {"step_s": simulator.step_time(problem, strategy), "feasible": cost.overflow_bytes(problem, strategy) == 0,
            "plan": strategy.text(problem.layers)}


def compare(case: Case, checkpoint: Path, planners: tuple[str, ...] = COMPARED,
            transfers: tuple[str, ...] = TRANSFERS) -> list[dict]:
    """Rows of one case: every planner, "nnpiper" and "network" (NNPiper without polish), in each transfer mode.

    The classical planners do not know the transfer mode: they plan once, and the plan is judged in each. Where a
    problem is beyond a planner's cap there is no row.
    """
    problem = case.problem()
    plans = {}
    for name in planners:
        try:
            plans[name] = solve_sorted(problem) if name == SORTED else PLANNERS[name](problem)
        except PlannerLimit:
            continue
    rows = []
    for mode in transfers:
        asked = problem.replace(transfers=mode)
        learned = {"nnpiper": piper(checkpoint).solve(asked), "network": piper(checkpoint).solve(asked, polish=False)}
        rows += [case.fields | {"transfers": mode, "planner": name} | judge(asked, plan)
                 for name, plan in (plans | learned).items()]
    return rows


def gaps(case: Case, checkpoint: Path, runs: int, moves: int) -> list[dict]:
    """Rows of one case for NNPiper, the network without polish and, up to 48 devices, the reference program, with long
    annealing (`runs` x `moves`, "annealing") to measure them by."""
    problem = case.problem()
    plans = {"annealing": baselines.anneal.solve(problem, seed=case.number, runs=runs, moves=moves),
             "nnpiper": piper(checkpoint).solve(problem), "network": piper(checkpoint).solve(problem, polish=False)}
    if problem.devices <= 48:  # a minute beyond
        plans[REFERENCE] = PLANNERS[REFERENCE](problem)
    return [case.fields | {"planner": name} | judge(problem, plan) for name, plan in plans.items()]


def parts(case: Case, checkpoint: Path) -> list[dict]:
    """Rows of one case for the solver's parts: the network's likeliest grouping, the best of 16 and of 64 groupings,
    the polished plan, and what as many moves reach from a plain start without the network."""
    problem = case.problem()
    network = piper(checkpoint)
    plans = {"likeliest grouping": network.solve(problem, polish=False, samples=1),
             "best of 16": network.solve(problem, polish=False, samples=16),
             "best of 64": network.solve(problem, polish=False, samples=64),
             "polished": network.solve(problem),
             "annealing, as many moves": baselines.anneal.solve(problem, seed=case.number, runs=1, moves=MOVES),
             "annealing": baselines.anneal.solve(problem, seed=case.number)}
    return [case.fields | {"planner": name} | judge(problem, plan) for name, plan in plans.items()]


def hidden(case: Case, checkpoint: Path) -> list[dict]:
    """Rows of one case for the network without polish when one input is kept from it: the plan it makes on a false
    problem, judged on the true one. Devices: all as the mean device. Links: all as the mean link. M: 1 in place of
    the true number."""
    problem = case.problem()
    K = problem.devices
    same = {name: np.repeat(getattr(problem, name).mean(axis=-1, keepdims=True), K, -1)
            for name in ("forward_s", "backward_s")}
    off = ~np.eye(K, dtype=bool)
    mean_rate = np.full((K, K), 1.0 / (1.0 / problem.bandwidth_bytes_per_s[off]).mean())
    seen = {"nothing": problem, "computation costs": problem.replace(**same),
            "communication costs": problem.replace(bandwidth_bytes_per_s=mean_rate,
                                                   latency_s=np.full((K, K), problem.latency_s[off].mean())),
            "micro-batches": problem.replace(micro_batches=1)}
    return [case.fields | {"hidden": name} | judge(problem, piper(checkpoint).solve(view, polish=False))
            for name, view in seen.items()]


def solve_sorted(problem: Problem) -> Strategy:
    """The reference program on the devices ordered from the slowest to the fastest: what a better fixed order, which
    needs no search, is worth. The slowest device then gets the embedding, which costs no FLOPs."""
    order = np.argsort(-(problem.forward_s + problem.backward_s).sum(axis=0), kind="stable")
    strategy = PLANNERS[REFERENCE](permuted(problem, order))
    return Strategy(strategy.cuts, tuple(tuple(int(order[k]) for k in group) for group in strategy.groups))


def relative_speeds(problem: Problem) -> np.ndarray:
    """[K] speed of each device over the fastest one's."""
    total = (problem.forward_s + problem.backward_s).sum(axis=0)
    return total.min() / total


def permuted(problem: Problem, order: np.ndarray) -> Problem:
    """The same problem with device order[k] in place k."""
    arrays = {}
    for name, letters in SHAPES.items():
        array = getattr(problem, name)
        for axis, letter in enumerate(letters):
            array = array.take(order, axis) if letter == "K" else array
        arrays[name] = array
    return problem.replace(**arrays)


def random_stages(rng: np.random.Generator, S: int, ratio: float) -> cost.StageArrays:
    """Stage arrays of a random fully heterogeneous plan: compute and transfers spread by a factor of up to e^1.4, the
    mean transfer, one way, `ratio` of the mean stage F + B; B = 2 F."""
    work = np.exp(rng.uniform(-0.7, 0.7, S))
    ahead, back = np.exp(rng.uniform(-0.7, 0.7, (2, S - 1)))
    scale = ratio * work.mean() / np.concatenate([ahead, back]).mean()
    return cost.StageArrays(work / 3, 2 * work / 3, scale * ahead, scale * back, np.zeros(S))


def closed_forms(stages: cost.StageArrays, M: int) -> dict[str, float]:
    """Step in s by the closed forms of the literature, all of `closed_form.FORMS` but the sharpest."""
    return {form: closed_form.formula(form, stages, M) for form in list(closed_form.FORMS)[:3]}


def closed_form_errors(ratio: float, S: int, M: int, plans: int) -> list[dict]:
    """Rows: % error of each closed form against the exact 1F1B step in each transfer mode, on random plans."""
    rng = np.random.default_rng([SEED, round(1e6 * ratio)])
    rows = []
    for number in range(plans):
        stages = random_stages(rng, S, ratio)
        for mode in TRANSFERS:
            exact = simulator.simulate(stages, "1f1b", M, mode)
            rows += [{"ratio": ratio, "transfers": mode, "form": form, "number": number,
                      "error": 100.0 * (value / exact - 1.0)} for form, value in closed_forms(stages, M).items()]
    return rows


def solve_times(solve: Callable[[Problem], Strategy], problems: list[Problem]) -> list[float]:
    """Wall time in s of each solve, with the model loaded and kernels compiled; the shape is met once beforehand."""
    _one_thread()
    solve(problems[0])
    times = []
    for problem in problems:
        begin = time.perf_counter()
        solve(problem)
        times.append(time.perf_counter() - begin)
    return times


@lru_cache(maxsize=8)
def piper(checkpoint: Path) -> NNPiper:
    """The solver of a checkpoint, loaded once a process."""
    return NNPiper.from_pretrained(checkpoint)


def _one_thread():
    import torch
    torch.set_num_threads(1)


def _start_worker():
    _one_thread()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent():
    """A kernel that is killed leaves no process behind."""
    multiprocessing.parent_process().join()
    os._exit(1)
