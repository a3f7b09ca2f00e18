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


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_fit_finds_cuts_that_fit_where_there_are_any_and_none_is_more_even(seed):
    rng = np.random.default_rng(seed)
    K, L = int(rng.integers(1, 7)), int(rng.integers(1, 9))
    problem = random_problem(rng, K=K, L=L, S=int(rng.integers(1, min(K, L) + 1)), memory=0.6)
    L, S = problem.layers, problem.stages
    given_plan = random_strategy(rng, problem)
    states = cost.encode([given_plan], L, problem.devices)
    step_s, overflow = simulator.step_times(problem, *states)
    memory.fit(problem, states, step_s, overflow)
    fitted = cost.decode(*(part[0] for part in states))
    assert fitted.groups == given_plan.groups
    assert step_s[0] == pytest.approx(simulator.step_time(problem, fitted))
    assert overflow[0] == pytest.approx(cost.overflow_bytes(problem, fitted))
    if cost.overflow_bytes(problem, given_plan) == 0:
        assert fitted == given_plan
        return
    plans = [Strategy(cuts, given_plan.groups) for cuts in combinations(range(1, L), S - 1)]
    fit = [plan for plan in plans if cost.overflow_bytes(problem, plan) == 0]
    assert (overflow[0] == 0) == bool(fit)
    if not fit:
        assert fitted == given_plan
        return
    work = np.append(0.0, layer_work(problem.forward_s + problem.backward_s).cumsum())
    part = lambda plan: np.diff(work[list(plan.bounds(L))])
    uneven = lambda plan: (part(plan) / part(given_plan)).max()
    least = min(map(uneven, fit))
    # a stage gets its one layer whatever the ratio, so that below the least one `fit` may fill the others no further
    assert uneven(fitted) <= max(least, 1.0) * (1 + 2.0**-memory.HALVINGS) + 1e-9


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
