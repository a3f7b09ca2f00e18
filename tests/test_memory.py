"""Cuts that keep within memory, against all cuts there are."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import random_problem
from plans import random_strategy

from nnpiper import cost, memory, simulator
from nnpiper.problem import Strategy
from nnpiper.search import layer_work


def fitted(problem, plan):
    """What `memory.fit` makes of one plan."""
    states = cost.encode([plan], problem.layers, problem.devices)
    step_s, overflow = simulator.step_times(problem, *states)
    memory.fit(problem, states, step_s, overflow)
    new = cost.decode(*(part[0] for part in states))
    assert step_s[0] == pytest.approx(simulator.step_time(problem, new))
    assert overflow[0] == pytest.approx(cost.overflow_bytes(problem, new))
    return new


def random_case(seed):
    rng = np.random.default_rng(seed)
    K, L = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    problem = random_problem(rng, K=K, L=L, S=int(rng.integers(1, min(K, L) + 1)), memory=rng.uniform(0.8, 2.5))
    return problem, random_strategy(rng, problem)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_fit_makes_plans_fit_and_changes_no_others(seed):
    problem, plan = random_case(seed)
    new = fitted(problem, plan)
    new.check(problem)
    assert new.groups == plan.groups
    assert new == plan or cost.overflow_bytes(problem, new) == 0 < cost.overflow_bytes(problem, plan)


def test_fit_finds_most_of_what_can_be_found():
    """In groups of any size, against all cuts; a greedy filling may miss some."""
    found = of = 0
    for seed in range(400):
        problem, plan = random_case(seed)
        cuts = combinations(range(1, problem.layers), problem.stages - 1)
        if cost.overflow_bytes(problem, plan) > 0 and any(
                cost.overflow_bytes(problem, Strategy(c, plan.groups)) == 0 for c in cuts):
            of += 1
            found += cost.overflow_bytes(problem, fitted(problem, plan)) == 0
    assert of > 40 and found >= 0.97 * of


@pytest.mark.parametrize("seed", range(60))
def test_with_equal_memory_and_single_devices_fit_finds_the_most_even_cuts(seed):
    rng = np.random.default_rng(seed)
    K, L = int(rng.integers(2, 5)), int(rng.integers(6, 10))
    problem = random_problem(rng, K=K, L=L, S=K, schedule="gpipe", memory=1.0)
    need = (problem.static_bytes + problem.micro_batches * problem.stash_bytes).sum() / K
    problem = problem.replace(memory_bytes=np.full(K, need * rng.uniform(1.0, 1.6)))
    plan = random_strategy(rng, problem)
    while cost.overflow_bytes(problem, plan) == 0:
        plan = random_strategy(rng, problem)
    plans = [Strategy(cuts, plan.groups) for cuts in combinations(range(1, L), K - 1)]
    fit = [other for other in plans if cost.overflow_bytes(problem, other) == 0]
    new = fitted(problem, plan)
    assert (cost.overflow_bytes(problem, new) == 0) == bool(fit)
    work = np.append(0.0, layer_work(problem.forward_s + problem.backward_s).cumsum())
    part = lambda plan: np.diff(work[list(plan.bounds(L))])
    uneven = lambda other: (part(other) / part(plan)).max()
    if fit:
        assert uneven(new) <= min(map(uneven, fit)) * (1 + 2.0**-memory.HALVINGS) + 1e-9


def test_fit_leaves_alone_what_is_slower_than_a_plan_that_fits():
    problem = random_problem(np.random.default_rng(1), K=2, L=6, S=2, M=4, schedule="gpipe", transfers="blocking")
    problem = problem.replace(stash_bytes=np.zeros(6), static_bytes=np.ones(6), memory_bytes=np.array([4.0, 4.0]))
    plans = [Strategy((cut,), groups) for cut in (1, 3, 5) for groups in (((0,), (1,)), ((1,), (0,)))]
    states = cost.encode(plans, 6, 2)
    before, overflow = simulator.step_times(problem, *states)
    shortest = before[overflow == 0].min()
    slower = (overflow > 0) & (before >= shortest)
    after = before.copy()
    memory.fit(problem, states, after, overflow)
    assert slower.any() and (after[slower] == before[slower]).all() and (overflow[slower] > 0).all()
    assert (overflow[~slower] == 0).all()
