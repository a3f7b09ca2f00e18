"""Simulated annealing over groups and cuts on the exact simulator (Kirkpatrick et al. 1983).

Several runs, each from the plain proportional start with the devices in random order, or, within a budget, one from the
best plain start (`starts.best_start`); the temperature falls geometrically to COLD of the current step, in a budget as
`cooling.temperatures` says.
"""

import time

import numpy as np

from .. import cost
from ..cooling import chunks, temperatures
from ..problem import Problem, Strategy
from ..search import Search, random_state, restarts
from ..starts import best_start

HOT, COLD = 0.1, 0.0003
# In a budget: over K, as more devices need more moves, and at most; with a device a stage over K^3. The best of 0.03,
# 0.06, 0.1 and 0.2 at K <= 16, of 0.007, 0.02 and 0.06 at K = 32 and 64, from 20 to 500 ms, and of 0.0016, 0.006 and
# 0.016 to 0.04 at S = K = 12 to 32, from 2 to 100 ms
HOT_IN_BUDGET, HOTTEST_IN_BUDGET, HOT_ALONE = 0.5, 0.06, 64.0
CHUNK = 500  # moves between two looks at the clock, at most


def solve(problem: Problem, seed: int = 0, runs: int = 4, moves: int = 60_000,
          budget_s: float | None = None) -> Strategy:
    """Best strategy of `runs` annealing runs of `moves` moves, or, with a budget, of one run that cools down within
    budget_s seconds."""
    begin = time.perf_counter()
    rng = np.random.default_rng(seed)
    if not budget_s:
        return cost.decode(*restarts(problem, runs, moves, (HOT, COLD), rng)[0])
    search, state = Search(problem), best_start(problem, rng)
    first, last = temperatures(problem, HOT_IN_BUDGET, HOTTEST_IN_BUDGET, HOT_ALONE, COLD)
    cooling = chunks(first, last, begin + budget_s, CHUNK)
    return cost.decode(*search.anneal(state, cooling, random_state(rng))[0])
