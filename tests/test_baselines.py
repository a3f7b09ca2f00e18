"""The planners: each against brute force on its own objective, and all for validity."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import random_problem

from nnpiper import cost, simulator
from nnpiper.baselines import (PLANNERS, PlannerLimit, alpa, alpa_hetero, amp, assignments, caps, completion, metis,
                               pipedream, pipeedge, piper)
from nnpiper.device_sets import same_before
from nnpiper.problem import Problem, Strategy

# annealing is searched for in its own tests; it is slow by design
FAST = [name for name in PLANNERS if name != "anneal"]
MEMORY = [None, 2.0, 1.3]


def cases(count, **fixed):
    """Random tiny problems, a third of them without a memory limit."""
    return [random_problem(np.random.default_rng(seed), memory=MEMORY[seed % 3], **fixed) for seed in range(count)]


def all_cuts(problem):
    return itertools.combinations(range(1, problem.layers), problem.stages - 1)


def all_groups(problem):
    """Every assignment of devices to stages in order; devices may stay unused."""
    K, S = problem.devices, problem.stages
    for labels in itertools.product(range(S + 1), repeat=K):
        groups = tuple(tuple(k for k in range(K) if labels[k] == s) for s in range(S))
        if all(groups):
            yield groups


def best_value(problem, groups, objective, fits=lambda p, s: cost.overflow_bytes(p, s) == 0.0):
    """Least objective over the groups given and all cuts among strategies that fit; inf where none does."""
    return min((objective(problem, s) for g in groups for c in all_cuts(problem) if fits(problem, s := Strategy(c, g))),
               default=math.inf)


def equal_homes(problem, exactly):
    """One choice of groups for each split of exactly (or at most) K devices into S sizes."""
    K, S = problem.devices, problem.stages
    for sizes in itertools.product(range(1, K + 1), repeat=S):
        if sum(sizes) == K or (sum(sizes) < K and not exactly):
            starts = np.cumsum((0, *sizes))
            yield tuple(tuple(range(first, last)) for first, last in zip(starts, starts[1:]))


def fits_evenly(problem, strategy):
    """Whether a plan fits where all devices are equal: each replica keeps 1 / n of the stash."""
    bounds, used = strategy.bounds(problem.layers), []
    for s, group in enumerate(strategy.groups):
        layers = slice(bounds[s], bounds[s + 1])
        in_flight = problem.micro_batches if problem.schedule == "gpipe" else min(problem.micro_batches,
                                                                                  problem.stages - s)
        used.append(problem.static_bytes[layers].sum() + in_flight * problem.stash_bytes[layers].sum() / len(group))
    return max(used) <= problem.memory_bytes.mean()


@pytest.mark.parametrize("planner, exactly", [(pipedream, True), (piper, False), (alpa, True)])
def test_equal_device_programs_are_optimal(planner, exactly):
    limited = 0
    for problem in cases(90):
        # equal memory, so that the mean and the smallest are one limit
        problem = problem.replace(memory_bytes=np.full(problem.devices, problem.memory_bytes.mean()))
        best = best_value(problem, equal_homes(problem, exactly), planner.objective, fits_evenly)
        free = best_value(problem, equal_homes(problem, exactly), planner.objective, lambda p, s: True)
        limited += best > free * (1.0 + 1e-9)
        found = planner.objective(problem, planner.solve(problem))
        assert found == pytest.approx(best if best < math.inf else free, rel=1e-9)
    assert limited >= 3


def test_alpa_hetero_is_optimal():
    def runs(problem):
        # groups of consecutive devices in the given order
        return [g for g in all_groups(problem) if all(np.diff(group).max(initial=1) == 1 for group in g)
                and [k for group in g for k in group] == sorted(k for group in g for k in group)]

    replicated = limited = 0
    for problem in cases(60):
        best = best_value(problem, runs(problem), alpa_hetero.objective)
        free = best_value(problem, runs(problem), alpa_hetero.objective, lambda p, s: True)
        plan = alpa_hetero.solve(problem)
        replicated += problem.stages > 1 and max(map(len, plan.groups)) > 1
        limited += best > free * (1.0 + 1e-9)
        assert alpa_hetero.objective(problem, plan) == pytest.approx(best if best < math.inf else free, rel=1e-9)
    assert replicated >= 5 and limited >= 3


def test_alpa_hetero_needs_its_exact_program():
    """Shares that change with the layers make the relaxed bound loose; the exact program must then decide."""
    problem = random_problem(np.random.default_rng(7), K=4, L=6, S=2, M=4, transfer_share=2.0)
    rng = np.random.default_rng(7)
    problem = problem.replace(forward_s=problem.forward_s * np.exp(rng.uniform(-2, 2, problem.forward_s.shape)),
                              gradient_bytes=np.zeros(6), latency_s=np.zeros((4, 4)))
    p = cost.pack(problem)
    tables = alpa_hetero._tables(p, 2, 4)
    total, _, _, rest, onward = alpa_hetero._relaxed(tables, 2, math.inf)
    least, runs, bounds = alpa_hetero._exact(p, tables, 2, math.inf, 1e9, rest, onward)
    pairs = [(range(a, b), range(c, d)) for a, b, c, d in itertools.combinations_with_replacement(range(5), 4)
             if a < b and c < d]
    sums = {(cut, *g): alpa_hetero._parts(problem, Strategy((cut,), g))[0] for g in pairs for cut in range(1, 6)}
    assert total < least * (1.0 - 1e-6)
    assert least == pytest.approx(min(sums.values()), rel=1e-12)
    groups = tuple(range(tables.first[r], tables.last[r]) for r in runs)
    assert sums[(int(bounds[1]), *groups)] == pytest.approx(least, rel=1e-12)


def test_amp_is_optimal():
    for problem in cases(40):
        best = best_value(problem, amp.placements(problem), amp.objective)
        if best == math.inf:
            best = best_value(problem, amp.placements(problem), amp.objective, lambda p, s: True)
        assert amp.objective(problem, amp.solve(problem)) == pytest.approx(best, rel=1e-9)


def test_pipeedge_is_optimal():
    limited = 0
    for problem in cases(60):
        groups = [g for g in all_groups(problem) if all(len(group) == 1 for group in g)]
        best = best_value(problem, groups, pipeedge.objective)
        free = best_value(problem, groups, pipeedge.objective, lambda p, s: True)
        limited += best > free * (1.0 + 1e-9)
        found = pipeedge.objective(problem, pipeedge.solve(problem))
        assert found == pytest.approx(best if best < math.inf else free, rel=1e-9)
    assert limited >= 3


@pytest.mark.parametrize("L", [62, 63, 64, 65, 130])
def test_pipeedge_with_more_layers_than_bits_of_a_word(L):
    problem = random_problem(np.random.default_rng(L), K=3, L=L, S=2)
    groups = [((a,), (b,)) for a, b in itertools.permutations(range(3), 2)]
    best = best_value(problem, groups, pipeedge.objective)
    assert pipeedge.objective(problem, pipeedge.solve(problem)) == pytest.approx(best, rel=1e-12)


def test_metis_takes_the_best_balanced_assignment():
    for number, problem in enumerate(cases(20)):
        if number % 2:  # all devices but the last alike
            K = problem.devices
            alike = np.minimum(np.arange(K), 1) * (np.arange(K) == K - 1)
            problem = problem.replace(
                forward_s=problem.forward_s[:, alike], backward_s=problem.backward_s[:, alike],
                memory_bytes=problem.memory_bytes[alike], latency_s=np.full((K, K), 1e-4),
                bandwidth_bytes_per_s=np.full((K, K), 1e9))
        all_plans = []
        for groups in all_groups(problem):
            labels = [[next((s for s, g in enumerate(groups) if k in g), -1) for k in range(problem.devices)]]
            if min(labels[0]) >= 0:
                plan = metis.balance(problem, np.array(labels))
                all_plans.append((cost.overflow_bytes(problem, plan), metis.objective(problem, plan)))
        plan = metis.solve(problem)
        found = cost.overflow_bytes(problem, plan), metis.objective(problem, plan)
        assert found == pytest.approx(min(all_plans), rel=1e-9)


def test_metis_balances_to_speed_and_memory():
    """One device three times as fast gets three times the layers; where it is too small, what fits."""
    problem = plain_problem(L=12, K=2, S=2, slowness=[1.0, 3.0])
    assert sorted(np.diff(metis.solve(problem).bounds(12))) == [3, 9]
    small = problem.replace(memory_bytes=np.array([6.5, 100.0]))
    plan = metis.solve(small)
    assert cost.overflow_bytes(small, plan) == 0.0
    assert len(range(*plan.bounds(12)[plan.groups.index((0,)):][:2])) in (5, 6)


def plain_problem(L, K, S, slowness=None, M=8) -> Problem:
    """Equal layers of 1 byte and 3 s, fast links."""
    slowness = np.ones(K) if slowness is None else np.array(slowness)
    return Problem(forward_s=np.ones((L, 1)) * slowness, backward_s=2.0 * np.ones((L, 1)) * slowness,
                   output_bytes=np.ones(L), stash_bytes=np.zeros(L), static_bytes=np.ones(L), gradient_bytes=np.ones(L),
                   memory_bytes=np.full(K, 1e3), bandwidth_bytes_per_s=np.full((K, K), 1e9),
                   latency_s=np.zeros((K, K)), stages=S, micro_batches=M)


@pytest.mark.parametrize("name", ["even", "pipedream", "alpa", "alpa-hetero", "amp", "pipeedge", "metis"])
@pytest.mark.parametrize("L, largest", [(7, 2), (30, 8), (40, 10)])
def test_equal_layers_on_equal_devices_are_cut_evenly(name, L, largest):
    plan = PLANNERS[name](plain_problem(L, K=4, S=4))
    assert max(np.diff(plan.bounds(L))) == largest


@pytest.mark.parametrize("name", ["pipedream", "piper", "alpa"])
def test_completion_gives_the_heaviest_stage_the_fastest_device(name):
    problem = plain_problem(L=4, K=2, S=2, slowness=[2.0, 1.0])
    problem = problem.replace(forward_s=problem.forward_s * np.array([[1.0], [1.0], [1.0], [10.0]]))
    assert PLANNERS[name](problem) == Strategy((3,), ((0,), (1,)))


def test_completion_keeps_the_large_device_for_the_stage_that_needs_it():
    """The fast device is the only large one; the light stage with the large weights must get it."""
    problem = plain_problem(L=3, K=2, S=2, slowness=[2.0, 1.0]).replace(
        static_bytes=np.array([1.0, 1.0, 9.0]), memory_bytes=np.array([5.0, 10.0]))
    assert completion.complete(problem, [0, 2, 3], [1, 1]).groups == ((0,), (1,))
    ample = problem.replace(memory_bytes=np.full(2, 10.0))
    assert completion.complete(ample, [0, 2, 3], [1, 1]).groups == ((1,), (0,))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 8), st.sampled_from([None, 1.5, 0.9, 0.01]),
       st.sampled_from(["random", "no work", "no costs"]), st.booleans())
def test_every_planner_returns_a_valid_strategy(seed, K, L, memory, costs, as_many_as_possible):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, K=K, L=L, S=min(K, L) if as_many_as_possible else None, memory=memory)
    if costs != "random":
        problem = problem.replace(forward_s=np.zeros((L, K)), backward_s=np.zeros((L, K)))
    if costs == "no costs":
        problem = problem.replace(output_bytes=np.zeros(L), latency_s=np.zeros((K, K)), gradient_bytes=np.zeros(L))
    best = PLANNERS["exact"](problem)
    best.check(problem)
    feasible = cost.overflow_bytes(problem, best) == 0.0
    for name in FAST:
        plan = PLANNERS[name](problem)
        plan.check(problem)
        fits = cost.overflow_bytes(problem, plan) == 0.0
        assert feasible or not fits, name
        if fits:
            shortest = simulator.step_time(problem, best)
            assert shortest <= simulator.step_time(problem, plan) * (1.0 + 1e-12), name


def test_assignments_are_all_and_different():
    """Devices 0, 2 and 3 are alike, device 1 is not: against all labels, ascending among the alike."""
    problem = plain_problem(L=3, K=4, S=1, slowness=[1.0, 2.0, 1.0, 1.0])
    same = same_before(problem)
    assert same.tolist() == [-1, -1, 0, 2]
    for S in range(1, 4):
        expected = [row for row in itertools.product(range(S), repeat=4)
                    if set(range(S)) <= set(row) and row[0] <= row[2] <= row[3]]
        assert [tuple(row) for row in assignments.labels(same, S).tolist()] == expected
        assert assignments.count(same, S) == len(expected)


def test_a_different_link_makes_devices_different():
    problem = plain_problem(L=3, K=3, S=1)
    bandwidth = problem.bandwidth_bytes_per_s.copy()
    bandwidth[0, 1] = 1e8  # directed, so that 0 and 1 differ too
    assert same_before(problem.replace(bandwidth_bytes_per_s=bandwidth)).tolist() == [-1, -1, -1]
    assert same_before(problem).tolist() == [-1, 0, 1]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=8), st.integers(1, 12))
def test_caps_find_the_least_of_all_plans(plans, M):
    """Plans as (sum, max) pairs: whatever the solver leaves out, the least sum + (M - 1) max remains."""
    def under_cap(cap, limit):
        return min(((total, largest, (total, largest)) for total, largest in plans if largest <= cap and total < limit),
                   default=(math.inf, math.inf, None))

    values = np.unique([largest for _, largest in plans] + [5, 15]).astype(float)
    value, plan = caps.minimise(values, M, under_cap)
    assert value == plan[0] + (M - 1) * plan[1] == min(total + (M - 1) * largest for total, largest in plans)


def test_planners_name_their_caps():
    with pytest.raises(PlannerLimit, match="pipeedge: 19 devices; allowed: at most 18"):
        pipeedge.solve(random_problem(np.random.default_rng(0), K=19, L=3, S=2))
    with pytest.raises(PlannerLimit, match="metis: .* assignments of 10 devices to 10 stages; allowed: at most 200000"):
        metis.solve(random_problem(np.random.default_rng(0), K=10, L=12, S=10))
    with pytest.raises(PlannerLimit, match="alpa-hetero: tables of 3.19e.09 bytes for 2080 runs of 64 devices"):
        alpa_hetero.solve(random_problem(np.random.default_rng(0), K=64, L=80, S=1))
    assert metis.solve(plain_problem(L=12, K=10, S=10)).groups  # equal devices need no reordering
