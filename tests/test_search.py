"""Local search: moves keep validity and reach every strategy, results are what the exact simulator says, and annealing
finds the optimum of problems that are small enough to try everything."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instances import random_problem
from plans import all_strategies, random_strategy

from nnpiper import cost, moves, search, xorshift
from nnpiper.problem import SCHEDULES, TRANSFERS
from nnpiper.search import Search
from nnpiper.simulator import step_time, step_times

SEEDS = st.integers(0, 2**32 - 1)


def random_start(rng, problem):
    return tuple(a[0] for a in cost.encode([random_strategy(rng, problem)], problem.layers, problem.devices))


def assert_valid(problem, bounds, order, starts):
    L, K, S = problem.layers, problem.devices, problem.stages
    assert bounds[0] == 0 and bounds[S] == L and (np.diff(bounds) >= 1).all()
    assert starts[0] == 0 and starts[S] <= K and (np.diff(starts) >= 1).all()
    assert sorted(order.tolist()) == list(range(K))


@given(SEEDS)
def test_every_move_keeps_validity(seed):
    """A temperature at which nothing is refused, one move at a time."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, K=int(rng.integers(1, 9)), L=int(rng.integers(1, 12)), memory=rng.choice([None, 0.5]))
    state, one, random = random_start(rng, problem), Search(problem), search.random_state(rng)
    for _ in range(200):
        one.run(state, 1, (1e12, 1e12), random)
        assert_valid(problem, *state)


@pytest.mark.parametrize("K, L, S", [(3, 4, 2), (4, 3, 2), (4, 3, 3), (3, 3, 1), (2, 5, 2)])
def test_moves_reach_every_strategy(K, L, S):
    """A long walk meets all there are: groups of every size, devices left unused, all cuts."""
    rng = np.random.default_rng(0)
    problem = random_problem(rng, K=K, L=L, S=S)
    state, one, random = random_start(rng, problem), Search(problem), search.random_state(rng)
    met = set()
    for _ in range(15_000):
        one.run(state, 1, (1e12, 1e12), random)
        met.add(cost.decode(*state))
    assert met == set(all_strategies(problem))


@given(SEEDS, st.sampled_from([0.0, 0.01, 1.0]), st.sampled_from([None, 0.5, 1.0]))
def test_run_reports_exactly_the_state_it_returns(seed, hot, memory):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, K=int(rng.integers(1, 9)), L=int(rng.integers(1, 12)), memory=memory)
    start = random_start(rng, problem)
    before = tuple(a.copy() for a in start)
    best, step_s, overflow = Search(problem).run(start, 300, (hot, hot / 10), search.random_state(rng))
    strategy = cost.decode(*best)
    assert_valid(problem, *best)
    assert_valid(problem, *start)  # where the run ended
    assert step_s == pytest.approx(step_time(problem, strategy), rel=1e-12)
    assert overflow == pytest.approx(cost.overflow_bytes(problem, strategy), rel=1e-9)
    first = cost.decode(*before)
    assert (overflow, step_s) <= (cost.overflow_bytes(problem, first), step_time(problem, first))
    again, again_s, _ = Search(problem).run(before, 0, (hot, hot / 10), search.random_state(rng))
    assert cost.decode(*again) == first and again_s == step_time(problem, first)


def test_descent_never_climbs():
    """At temperature 0 the last state is the best one, or as good."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        problem = random_problem(rng, K=6, L=10)
        state = random_start(rng, problem)
        _, step_s, _ = Search(problem).run(state, 500, (0.0, 0.0), search.random_state(rng))
        assert step_time(problem, cost.decode(*state)) == pytest.approx(step_s, rel=1e-12)


def test_reproducible_from_the_seed_and_only_from_it():
    problem = random_problem(np.random.default_rng(2), K=8, L=20, S=4, M=8)

    def run(seed, one=None):
        one = one or Search(problem)
        state = search.proportional_state(problem, np.arange(8))
        best, step_s, _ = one.run(state, 400, (0.1, 0.001), search.random_state(np.random.default_rng(seed)))
        return cost.decode(*best), cost.decode(*state), step_s

    assert run(3) == run(3)
    assert len({run(seed) for seed in range(5)}) > 1
    used = Search(problem)
    assert [run(seed, used) for seed in (4, 5, 4)] == [run(seed) for seed in (4, 5, 4)]


@pytest.mark.parametrize("memory", [None, 1.2, 0.4])
def test_annealing_reaches_the_brute_force_optimum(memory):
    """Feasible before infeasible; where nothing fits, the least bytes over memory."""
    rng = np.random.default_rng(4)
    feasible = []
    for case in range(12):
        K, L = [(3, 6), (4, 4), (4, 5), (2, 6)][case % 4]
        problem = random_problem(rng, K=K, L=L, S=int(rng.integers(2, min(K, L) + 1)), memory=memory)
        strategies = all_strategies(problem)
        steps, over = step_times(problem, *cost.encode(strategies, L, K))
        best = min(zip(over, steps))
        found = []
        for _ in range(4):
            state = search.proportional_state(problem, rng.permutation(K))
            found.append(Search(problem).run(state, 15_000, (0.3, 1e-3), search.random_state(rng))[2:0:-1])
        assert min(found)[0] == pytest.approx(best[0], rel=1e-9)
        feasible.append(best[0] == 0)
        if feasible[-1]:
            assert min(found)[1] == pytest.approx(best[1], rel=1e-9)
    assert all(feasible) if memory is None else not all(feasible)  # some cases of both kinds, over the parameters


def test_better_puts_feasible_first():
    assert search.better(9.0, 0.0, 1.0, 5.0) and not search.better(1.0, 5.0, 9.0, 0.0)
    assert search.better(9.0, 4.0, 1.0, 5.0) and search.better(1.0, 0.0, 2.0, 0.0)
    assert not search.better(1.0, 0.0, 1.0, 0.0)


@given(SEEDS)
def test_cuts_by_share_gives_each_stage_a_layer(seed):
    rng = np.random.default_rng(seed)
    L = int(rng.integers(1, 30))
    S = int(rng.integers(1, L + 1))
    work = rng.uniform(0, 1, L) ** rng.choice([0, 1, 20]) * (rng.random(L) < 0.8) + 1e-12
    share = rng.uniform(0, 1, (8, S)) ** rng.choice([1, 8, 100]) * (rng.random((8, S)) < 0.95) + (np.arange(S) == 0)
    bounds = search.cuts_by_share(work / work.sum(), share)
    assert (bounds[:, 0] == 0).all() and (bounds[:, -1] == L).all() and (np.diff(bounds) >= 1).all()


@given(SEEDS)
def test_cuts_by_share_spares_the_most_overloaded_stage(seed):
    """Against all cuts: the largest work / share is the least there is, but for the 8 halvings of the bisection. Shares
    hold a layer or more here; with smaller ones the cuts are valid but may not be the best."""
    rng = np.random.default_rng(seed)
    L, S = 16, int(rng.integers(1, 5))
    work = rng.uniform(0.5, 1, L)
    work /= work.sum()
    share = rng.uniform(0.6, 1, S)

    def worst(bounds):
        return max(work[low:high].sum() / share[s] for s, (low, high) in enumerate(zip(bounds, bounds[1:])))

    best = min(worst((0, *cuts, L)) for cuts in combinations(range(1, L), S - 1))
    assert worst(search.cuts_by_share(work, share[None])[0].tolist()) <= best * (1 + 1 / 256)


def test_cuts_by_share_by_hand():
    work = np.array([0.1, 0.4, 0.4, 0.1])
    for share, cut in ((0.5, 2), (0.1, 1), (0.9, 3), (0.999, 3), (1e-9, 1)):
        assert search.cuts_by_share(work, np.array([[share, 1 - share]]))[0].tolist() == [0, cut, 4]


@given(SEEDS)
def test_proportional_state(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, K=int(rng.integers(1, 14)), L=int(rng.integers(1, 20)))
    devices = rng.permutation(problem.devices)
    bounds, order, starts = search.proportional_state(problem, devices)
    assert_valid(problem, bounds, order, starts)
    assert order.tolist() == devices.tolist() and starts[-1] == problem.devices
    assert np.ptp(np.diff(starts)) <= 1


def test_layer_work_is_a_share_even_without_work():
    assert search.layer_work(np.zeros((5, 3))).tolist() == [0.2] * 5
    # device 1 is ten times slower: relative costs count, not seconds
    assert search.layer_work(np.array([[1.0, 30.0], [3.0, 10.0]])) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("transfers", TRANSFERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_the_bounds_refuse_the_simulation_would_refuse(schedule, transfers):
    """The same search with every move simulated ends in the same state."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, K=7, L=16, S=(3, 4, 7)[seed % 3], M=(2, 5, 12)[seed // 2], schedule=schedule,
                                 transfers=transfers)
        start, seen = search.proportional_state(problem, rng.permutation(7)), np.array([seed + 1], np.uint64)
        state, random = tuple(a.copy() for a in start), seen.copy()
        Search(problem).run(state, 400, (0.03, 0.003), seen)
        every = simulating_every_move(problem, start, 400, (0.03, 0.003), random)
        assert seen == random and all((a == b).all() for a, b in zip(state, every))


def simulating_every_move(problem, state, count, temperatures, random):
    far, K, blocking = cost.pack(problem).s_per_byte, problem.devices, problem.transfers == "blocking"
    speed = search.device_speed(problem.forward_s + problem.backward_s)
    temperature, cooling = temperatures[0], (temperatures[1] / temperatures[0]) ** (1 / count)
    step = step_times(problem, *(a[None] for a in state))[0][0]
    for _ in range(count):
        new = tuple(a.copy() for a in state)
        stages = cost.stage_arrays(problem, cost.decode(*state)).matrix()
        slowest, plan = search._slowest(stages, blocking), np.zeros(problem.stages, np.int64)
        if moves.move(*state, *new, slowest, random, plan, speed, far, K):
            threshold = step * (1.0 - temperature * np.log(xorshift.uniform(random)))
            new_step = step_times(problem, *(a[None] for a in new))[0][0]
            if new_step <= threshold:
                state, step = new, new_step
        temperature *= cooling
    return state
