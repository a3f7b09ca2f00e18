"""The development set and the test set: fresh random problems on which planners are compared under time budgets.

Every constant of the solver was chosen on the development set; the test set is for reported numbers alone. A *trial* is
one random problem, named by its fields: the same trial is the same problem on every machine. All environments, both
schedules and both transfer modes occur equally often, the model is any of the catalogue that fits, and in a third of
the trials memory binds: the plan that would be best without limits does not fit.

Symbols: K devices, S stages, M micro-batches.
"""

import zlib
from dataclasses import dataclass

import numpy as np

from . import baselines, cost
from .cluster import ENVIRONMENTS, has_room, sample_problem
from .problem import SCHEDULES, TRANSFERS, InputError, Problem
from .workload import MODELS

SETS = ("development", "test")
EVERY_DEVICE = ((4, 4), (8, 8), (12, 12), (16, 16))  # (K, S)
GROUPS = ((8, 4), (12, 6), (16, 8), (16, 4))
LARGE = ((32, 32), (32, 8), (64, 16), (64, 8))
TIGHT = 0.95  # of a device's memory may be used by the plan that shows a problem to be feasible
TRIAL = ["devices", "stages", "environment", "schedule", "transfers", "number"]  # what names a trial within its set
DRAWS = 200  # problems drawn before a size is given up


@dataclass(frozen=True)
class Trial:
    """One random problem of a set."""

    set: str
    devices: int
    stages: int
    environment: str
    schedule: str
    transfers: str
    number: int = 0

    def problem(self) -> Problem:
        """The problem; it has a feasible strategy. In every third trial, memory binds."""
        rng = np.random.default_rng(zlib.crc32(repr(self).encode()))
        binding = rng.random() < 1 / 3
        for _ in range(DRAWS):
            drawn = self._draw(rng)
            if drawn is not None and binding:
                drawn = bind_memory(drawn, rng)
            if drawn is not None:
                return drawn
        raise AssertionError(f"{self}: no problem in {DRAWS} draws")

    def _draw(self, rng):
        model = str(rng.choice(list(MODELS)))
        M = int(rng.choice([self.stages, 2 * self.stages, 4 * self.stages]))
        size = int(rng.choice([1, 2, 4]))
        try:
            return sample_problem(rng, model, self.environment, self.devices, self.stages, self.schedule,
                                  self.transfers, M, size)
        except InputError:  # fewer layers than stages, or too large for the catalogue's devices
            return None


def trials(which: str, sizes: tuple[tuple[int, int], ...], count: int = 1) -> list[Trial]:
    """`count` trials for each size (K, S), environment, schedule and transfer mode."""
    return [Trial(which, K, S, environment, schedule, transfers, number) for K, S in sizes
            for environment in ENVIRONMENTS for schedule in SCHEDULES for transfers in TRANSFERS
            for number in range(count)]


def bind_memory(problem: Problem, rng: np.random.Generator) -> Problem | None:
    """The problem with every device's memory scaled so far down that the best plan found without limits does not fit,
    though some plan does; None where no such factor is found."""
    free = problem.replace(memory_bytes=np.full(problem.devices, 1e30))
    best = baselines.anneal.solve(free, seed=int(rng.integers(2**31)), runs=1, moves=20_000)
    most = float((cost.memory_used(free, best) / problem.memory_bytes).max())  # below this factor it does not fit
    scaled = lambda factor: problem.replace(memory_bytes=problem.memory_bytes * factor)
    low, high = most / 64, most  # find the least factor with a feasible plan
    if not has_room(scaled(high), TIGHT):
        return None
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if has_room(scaled(middle), TIGHT) else (middle, high)
    if high > 0.98 * most:
        return None
    return scaled(high + (most - high) * rng.uniform(0.1, 0.9))
