"""Plain starts, and the development and test sets that planners are compared on."""

import dataclasses
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import random_problem

from nnpiper import cost, simulator, testset
from nnpiper.baselines import anneal
from nnpiper.cluster import ENVIRONMENTS, has_room, sample_problem
from nnpiper.problem import SCHEDULES, TRANSFERS
from nnpiper.search import proportional_state
from nnpiper.starts import best_start, plain_starts
from nnpiper.testset import Trial


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_a_plain_start_is_valid_and_no_worse_than_the_two_orders_that_anyone_would_try(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, K=int(rng.integers(1, 9)), L=int(rng.integers(1, 12)),
                             memory=rng.choice([None, 0.7]))
    start = cost.decode(*best_start(problem, np.random.default_rng(seed)))
    start.check(problem)
    assert start == cost.decode(*best_start(problem, np.random.default_rng(seed)))
    slowest_first = np.argsort(-(problem.forward_s + problem.backward_s).sum(0), kind="stable")
    largest_first = np.argsort(-problem.memory_bytes, kind="stable")
    outcome = lambda strategy: (cost.overflow_bytes(problem, strategy), simulator.step_time(problem, strategy))
    for order in (slowest_first, largest_first):
        assert outcome(start) <= outcome(cost.decode(*proportional_state(problem, order)))


def test_where_links_decide_the_start_follows_them():
    """Devices on a ring with fast links to the next alone, named in random order: only the chain finds the ring."""
    rng = np.random.default_rng(1)
    K, place = 9, np.random.default_rng(2).permutation(9)
    problem = random_problem(rng, K=K, L=30, S=K, M=8, schedule="1f1b", transfers="blocking")
    near = np.abs(place[:, None] - place[None]) % (K - 2) == 1
    problem = problem.replace(forward_s=np.full((30, K), 1e-3), backward_s=np.full((30, K), 2e-3),
                              bandwidth_bytes_per_s=np.where(near, 1e12, 1e6), latency_s=np.zeros((K, K)))
    order = best_start(problem, rng)[1]
    assert sum(near[a, b] for a, b in zip(order, order[1:])) >= K - 2


def test_where_links_are_too_slow_for_replicas_the_best_start_leaves_devices_unused():
    problem = random_problem(np.random.default_rng(3), K=9, L=12, S=1, M=4, schedule="gpipe", transfers="blocking")
    problem = problem.replace(forward_s=np.full((12, 9), 1e-3), backward_s=np.full((12, 9), 2e-3),
                              gradient_bytes=np.full(12, 1e9), bandwidth_bytes_per_s=np.full((9, 9), 1e6))
    (_, _, starts), step_s, _ = plain_starts(problem, np.random.default_rng(0))
    assert starts[:, -1].tolist() == [1, 3, 9] and (np.diff(step_s) > 0).all()
    fast = problem.replace(bandwidth_bytes_per_s=np.full((9, 9), 1e15), latency_s=np.zeros((9, 9)))
    assert best_start(fast, np.random.default_rng(0))[2][-1] == 9


def test_trials_are_what_their_fields_say_and_the_sets_differ():
    trials = testset.trials("development", ((4, 4), (8, 4)))
    assert len(trials) == len(set(trials)) == 2 * len(ENVIRONMENTS) * len(SCHEDULES) * len(TRANSFERS)
    for trial in trials[::7]:
        problem, other = trial.problem(), dataclasses.replace(trial, set="test").problem()
        assert (problem.devices, problem.stages, problem.schedule, problem.transfers) == (
            trial.devices, trial.stages, trial.schedule, trial.transfers)
        assert problem.to_json() == trial.problem().to_json() != other.to_json()
        assert has_room(problem, testset.TIGHT)


def test_in_a_third_of_the_trials_memory_binds():
    trials = [Trial("development", K, S, environment, "1f1b", "blocking", number) for K, S in testset.GROUPS
              for environment in ENVIRONMENTS for number in range(30)]
    binding = [np.random.default_rng(zlib.crc32(repr(trial).encode())).random() < 1 / 3 for trial in trials]
    assert np.mean(binding) == pytest.approx(1 / 3, abs=0.06)


@pytest.mark.parametrize("environment", ["homogeneous", "completely_heterogeneous"])
def test_where_memory_binds_the_best_plan_without_limits_does_not_fit(environment):
    rng = np.random.default_rng(5)
    roomy = sample_problem(rng, "gpt2-xl", environment, 6, 6, "1f1b", "blocking", 12)
    bound = testset.bind_memory(roomy, rng)
    ratio = bound.memory_bytes / roomy.memory_bytes
    assert ratio == pytest.approx(np.full(6, ratio[0])) and ratio[0] < 1
    free = bound.replace(memory_bytes=np.full(6, 1e30))
    best = anneal.solve(free, seed=1, runs=1, moves=20_000)
    assert cost.overflow_bytes(bound, best) > 0
    assert cost.overflow_bytes(bound, cost.fill_memory(bound, testset.TIGHT)) == 0
