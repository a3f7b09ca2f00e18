"""Proofs: against brute force over all strategies, and of sizes that no brute force reaches."""

import itertools

import numpy as np
import pytest
from instances import random_problem
from plans import all_strategies, odd_problem, shuffled

from nnpiper import cost
from nnpiper.baselines import PlannerLimit, exact, subset
from nnpiper.problem import SCHEDULES, TRANSFERS
from nnpiper.simulator import step_time, step_times

MODES = list(itertools.product(SCHEDULES, TRANSFERS))


def cases(count, **fixed):
    for seed in range(count):
        rng = np.random.default_rng(1000 + seed)
        yield random_problem(rng, M=int(rng.choice([1, 2, 3, 5, 8, 13])), memory=[None, 2.0, 1.3, 0.7][seed % 4],
                             transfer_share=(0.1, 0.5, 2.0)[seed % 3], **fixed)


def steps_that_count(problem):
    """Strategies that fit, or all where none does, and their steps."""
    strategies = all_strategies(problem)
    step, overflow = step_times(problem, *cost.encode(strategies, problem.layers, problem.devices))
    counts = overflow == 0.0 if (overflow == 0.0).any() else np.ones(len(step), bool)
    return [s for s, c in zip(strategies, counts) if c], step[counts]


@pytest.mark.parametrize("schedule, transfers", MODES)
def test_the_optimum_is_that_of_brute_force(schedule, transfers):
    for problem in cases(30, schedule=schedule, transfers=transfers):
        strategies, steps = steps_that_count(problem)
        best, step_s, lower_s, proven = exact.prove(problem, 60.0)
        assert proven and best in strategies
        assert step_s == step_time(problem, best) == pytest.approx(steps.min(), rel=1e-12)
        assert step_s * (1.0 - 1e-8) <= lower_s <= step_s
        assert step_time(problem, exact.solve(problem)) == pytest.approx(step_s, rel=1e-12)


def test_the_optimum_of_odd_problems_is_that_of_brute_force():
    for number, problem in enumerate(cases(60)):
        problem = odd_problem(np.random.default_rng(number), problem)
        steps = steps_that_count(problem)[1]
        assert step_time(problem, exact.solve(problem)) == pytest.approx(steps.min(), rel=1e-12)


def test_names_of_devices_leave_the_optimum():
    for number, problem in enumerate(cases(10, K=6, L=9, S=4)):
        renamed, _ = shuffled(np.random.default_rng(number), problem)
        step_s = step_time(problem, exact.solve(problem))
        assert step_time(renamed, exact.solve(renamed)) == pytest.approx(step_s, rel=1e-12)


@pytest.mark.parametrize("schedule, transfers", MODES)
@pytest.mark.parametrize("K, L, S, M", [(6, 26, 6, 32), (8, 26, 8, 16), (5, 26, 3, 16), (5, 26, 4, 8)])
def test_proofs_of_useful_sizes(K, L, S, M, schedule, transfers):
    problem = random_problem(np.random.default_rng(K + M), K=K, L=L, S=S, M=M, schedule=schedule, transfers=transfers,
                             memory=2.0 if schedule == "1f1b" else 20.0)
    best, step_s, lower_s, proven = exact.prove(problem, 20.0)
    assert proven and cost.overflow_bytes(problem, best) == 0.0
    assert step_s == step_time(problem, best)
    assert exact.prove(problem, 20.0) == (best, step_s, lower_s, True)


def test_no_time_no_proof():
    """Without time the bound is still one, and nothing is claimed."""
    problem = random_problem(np.random.default_rng(0), K=6, L=20, S=6, M=8, schedule="1f1b", transfers="overlapped")
    optimum = step_time(problem, exact.solve(problem))
    best, step_s, lower_s, proven = exact.prove(problem, 1e-9)
    assert not proven and 0.0 < lower_s <= optimum <= step_s == step_time(problem, best)


def test_beyond_reach():
    problem = random_problem(np.random.default_rng(0), K=20, L=26, S=20)
    with pytest.raises(PlannerLimit, match="exact: no proof for 20 devices, 26 layers and 20 stages; allowed: at most"):
        exact.solve(problem)
    with pytest.raises(PlannerLimit, match="subset: 20 devices, 26 layers and 20 stages; allowed: about 12 devices"):
        subset.solve(problem)
    _, step_s, lower_s, proven = exact.prove(problem, 1.0)
    assert not proven and 0.0 < lower_s <= step_s


def test_subset_has_the_least_longest_path():
    for problem in cases(60):
        strategies, _ = steps_that_count(problem)
        plan = subset.solve(problem)
        assert plan in strategies
        least = min(subset.objective(problem, strategy) for strategy in strategies)
        assert subset.objective(problem, plan) == pytest.approx(least, rel=1e-8)
