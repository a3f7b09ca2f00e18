"""Proof: the least exact step among strategies that fit in memory, by branch and bound on the subset program.

The program (subset_program.py) says for every end of a pipeline what its paths take at least, and the search
(branching.py) decides the stages before them one by one. The best step starts as annealing's, which the proof then
confirms or replaces. Where no strategy fits in memory, all of this is about the problem without a limit.

Cap: the program must be within reach (MOST_KEYS, MOST_PAIRS), and the program and the search within MOST_STEPS each.
"""

import math
import time

from .. import cost, simulator, subset_program
from ..bound import lower_bound
from ..problem import Problem, Strategy
from . import anneal
from .assignments import PlannerLimit
from .branching import minimise

MOST_KEYS, MOST_PAIRS = 3e7, 5e7
MOST_STEPS = 3e8  # of `solve`: up to a minute


def solve(problem: Problem) -> Strategy:
    """A strategy with the least exact step. Raises PlannerLimit where that cannot be proven within the caps."""
    program = _program(problem)
    strategy, _, _, proven = (None, 0.0, 0.0, False) if program is None else _prove(problem, program, MOST_STEPS,
                                                                                    math.inf)
    if not proven:
        raise PlannerLimit(f"exact: no proof for {problem.devices} devices, {problem.layers} layers and "
                           f"{problem.stages} stages; allowed: at most {MOST_STEPS:.3g} steps of the search")
    return strategy


def prove(problem: Problem, limit_s: float) -> tuple[Strategy, float, float, bool]:
    """(the best strategy found, its step in s, a lower bound of all feasible steps in s, whether that proves the
    strategy the best) after a search of about limit_s seconds, or less where it is done."""
    deadline = time.perf_counter() + limit_s
    return _prove(problem, _program(problem), math.inf, deadline)


def _program(problem):
    return subset_program.build(problem, MOST_KEYS, MOST_PAIRS)


def _prove(problem, program, most_steps, deadline):
    best = anneal.solve(problem)
    step_s, fits = simulator.step_time(problem, best), cost.overflow_bytes(problem, best) == 0.0
    if program is None:
        return best, step_s, lower_bound(problem), False
    if not fits and not subset_program.feasible(program):
        free = problem.without_memory_limit()
        return _prove(free, _program(free), most_steps, deadline)
    better, lower_s, proven = minimise(problem, program, step_s if fits else None, False, most_steps, deadline)
    if better is not None:
        best, step_s, fits = better, simulator.step_time(problem, better), True
    if not proven:
        lower_s = max(lower_s, lower_bound(problem, step_s if fits else None))
    return best, step_s, min(lower_s, step_s) if fits else lower_s, proven
