"""The strongest dynamic program here: least longest path over subsets of devices, with true links and memory.

Its objective is the longest of the paths through the exact schedule that critical_path.py knows in closed form: a
stage's own transfers inside the maximum where they block it, round trips under 1F1B, all-reduces. It is below the exact
step or equal to it; most often it is within a percent. The program's labels (of which it keeps few) bound what each end
of a pipeline takes, and branching.py finds the strategy that attains the least. A short annealing run sets the limit
from which the program is pruned; it has no say in the plan. Where no strategy fits in memory the plan is that of the
problem without a limit.

Cap: the program must be within reach (MOST_KEYS, MOST_PAIRS), and it and the search within MOST_STEPS each: some
10 s. Where only the search is not done by then, the best strategy that it met is returned.
"""

import numpy as np

from .. import cost, subset_program
from ..bound import ROUNDING, attained
from ..critical_path import label_parts, longest_path
from ..problem import Problem, Strategy
from .assignments import PlannerLimit
from .branching import minimise

MOST_KEYS, MOST_PAIRS, MOST_STEPS = 3e7, 5e7, 3e7


def solve(problem: Problem) -> Strategy:
    """The strategy with the least longest path. Raises PlannerLimit."""
    program = subset_program.build(problem, MOST_KEYS, MOST_PAIRS)
    if program is None:
        raise PlannerLimit(f"subset: {problem.devices} devices, {problem.layers} layers and {problem.stages} stages; "
                           "allowed: about 12 devices where each has a stage, 10 in groups, or more that are alike")
    upper_s = attained(problem)
    if upper_s is None and not subset_program.feasible(program):
        return solve(problem.without_memory_limit())
    if upper_s is not None:  # as a limit that its own plan is below
        upper_s = max(upper_s * (1.0 + ROUNDING), 1e-30)
    plan, _, _ = minimise(problem, program, upper_s, True, MOST_STEPS)
    if plan is None:
        raise PlannerLimit(f"subset: {problem.devices} devices, {problem.layers} layers and {problem.stages} stages "
                           f"take over {MOST_STEPS:.3g} steps")
    return plan


def objective(problem: Problem, strategy: Strategy) -> float:
    """s of the longest path."""
    stages, rules = cost.stage_arrays(problem, strategy).matrix(), (problem.transfers == "blocking",
                                                                    problem.schedule == "1f1b")
    nothing = np.zeros(label_parts(*rules))
    return longest_path(stages, problem.stages - 1, 0.0, 0.0, problem.micro_batches, *rules, nothing)
