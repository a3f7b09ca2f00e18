"""Planners to measure against, one a file, behind one interface: solve(problem) -> Strategy.

Each follows the algorithm and the objective of its paper, is given all that its model can take, and is compiled where
its work is heavy. A planner with an objective of its own has objective(problem, strategy), what its program minimises
(seconds), so that tests can compare it with brute force; the caller judges plans by the exact step alone. A planner
whose documented cap a problem exceeds raises PlannerLimit. Every planner returns exactly S stages; one that finds no
plan within memory returns one that does not fit, and the caller's exact memory check says so.

Symbols in all modules: L layers, K devices, S stages, M micro-batches; C(s) = F(s) + B(s) compute of stage s and
c(s) both transfers over the boundary after it, per micro-batch.
"""

from collections.abc import Callable

from ..problem import Problem, Strategy
from . import alpa, alpa_hetero, amp, anneal, even, exact, metis, pipedream, pipeedge, piper, subset
from .assignments import PlannerLimit

PLANNERS: dict[str, Callable[[Problem], Strategy]] = {
    "even": even.solve,
    "pipedream": pipedream.solve,
    "piper": piper.solve,
    "alpa": alpa.solve,
    "alpa-hetero": alpa_hetero.solve,
    "amp": amp.solve,
    "pipeedge": pipeedge.solve,
    "metis": metis.solve,
    "subset": subset.solve,
    "anneal": anneal.solve,
    "exact": exact.solve,
}

__all__ = ["PLANNERS", "PlannerLimit"]
