"""Lower bounds: never above the step of any strategy, close to the best one's, and blind to units and names."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import random_problem
from plans import all_strategies, odd_problem, random_strategy, shuffled

from nnpiper import bound, cost, critical_path, device_sets, subset_program
from nnpiper.baselines import anneal, subset
from nnpiper.cost import StageArrays
from nnpiper.problem import SCHEDULES, TRANSFERS, Problem
from nnpiper.simulator import simulate, step_time, step_times

SEEDS = st.integers(0, 2**32 - 1)
MODES = list(itertools.product(SCHEDULES, TRANSFERS))
MEMORY = [None, 2.0, 1.3, 0.7]


def cases(count, schedule=None, transfers=None, odd=False):
    """Random tiny problems of all kinds: from ample to too little memory, transfers from light to heavy."""
    for seed in range(count):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, M=int(rng.choice([1, 2, 3, 5, 8, 13])), schedule=schedule, transfers=transfers,
                                 memory=MEMORY[seed % 4], transfer_share=(0.1, 0.5, 2.0)[seed % 3])
        yield odd_problem(rng, problem) if odd else problem


def optimum(problem):
    """Least step of all strategies that fit, or of all where none does."""
    step, overflow = step_times(problem, *cost.encode(all_strategies(problem), problem.layers, problem.devices))
    return step[overflow == 0.0].min() if (overflow == 0.0).any() else step.min()


@pytest.mark.parametrize("schedule, transfers", MODES)
def test_never_above_the_optimum_and_close_to_it(schedule, transfers):
    gaps = []
    for problem in cases(40, schedule, transfers):
        best = optimum(problem)
        least = bound.lower_bound(problem)
        assert 0.0 < least <= best * (1.0 + 1e-12)
        assert 0.0 < bound.simple_bound(problem) <= least
        assert bound.lower_bound(problem, upper_s=best) <= best * (1.0 + 1e-12)
        gaps.append(100.0 * (1.0 - least / best))
    print(f"{schedule} {transfers}: below the optimum by {np.mean(gaps):.3f} % on average, {max(gaps):.2f} % at most")
    assert np.mean(gaps) < (0.6 if schedule == "1f1b" else 0.3) and np.median(gaps) < 1e-6


def test_never_above_the_optimum_of_odd_problems():
    for problem in cases(60, odd=True):
        assert 0.0 <= bound.lower_bound(problem) <= optimum(problem) * (1.0 + 1e-12)


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("schedule, transfers", MODES)
def test_the_program_loses_no_strategy(schedule, transfers, keyed):
    """Whatever the limit above the optimum, the program has a pipeline that is no longer. Not keyed: as for many
    devices, with the best links in place of the true ones."""
    longer = [random_problem(np.random.default_rng(seed), K=4, S=4, L=12, M=(3, 8, 13)[seed % 3], schedule=schedule,
                             transfers=transfers, memory=MEMORY[seed % 4]) for seed in range(20)]
    for problem in [*cases(30, schedule, transfers), *longer]:
        program = subset_program.build(problem, 1e9 * keyed, 1e9)
        if not subset_program.feasible(program):
            continue
        best = optimum(problem)
        for limit in (1.0 + 1e-9, 1.05, 1.5, 1e3):
            assert 0.0 < subset_program.solve(program, best * limit, 1e9)[1] <= best * (1.0 + 1e-9)


@given(SEEDS, st.sampled_from(MODES), st.integers(1, 9), st.integers(1, 40))
@settings(max_examples=300)
def test_no_path_is_longer_than_the_step(seed, mode, S, M):
    """Stages with nothing in common: each time drawn over three orders of magnitude."""
    schedule, transfers = mode
    rng = np.random.default_rng(seed)
    nothing = np.zeros(critical_path.label_parts(transfers == "blocking", schedule == "1f1b"))
    for _ in range(20):
        stages = StageArrays(*(10.0 ** rng.uniform(-3, 0, n) for n in (S, S, S - 1, S - 1, S)))
        for times in vars(stages).values():
            times[rng.random(len(times)) < rng.choice([0.0, 0.5, 1.0])] = 0.0
        path = critical_path.longest_path(stages.matrix(), S - 1, 0.0, 0.0, M, transfers == "blocking",
                                          schedule == "1f1b", nothing)
        step = simulate(stages, schedule, M, transfers)
        assert path <= step * (1.0 + 1e-12)
        if schedule == "gpipe":
            assert path == pytest.approx(step, rel=1e-12)


def test_paths_are_close_to_the_step_of_good_plans():
    gaps = []
    for seed in range(16):
        problem = random_problem(np.random.default_rng(seed), K=6, L=18, S=6, M=16, schedule="1f1b",
                                 transfers=TRANSFERS[seed % 2])
        plan = anneal.solve(problem, runs=1, moves=5000)
        gaps.append(1.0 - subset.objective(problem, plan) / step_time(problem, plan))
    assert np.mean(gaps) < 0.01


@given(SEEDS, st.sampled_from(["forward_s", "backward_s", "output_bytes", "latency_s", "gradient_bytes"]))
def test_a_longer_stage_never_shortens_a_path(seed, field):
    """What the program relies on where it takes a part of a label at its least."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, K=5, L=8, M=int(rng.integers(1, 12)))
    strategy = random_strategy(rng, problem)
    more = problem.replace(**{field: getattr(problem, field) * rng.uniform(1.0, 3.0)})
    assert subset.objective(problem, strategy) <= subset.objective(more, strategy) * (1.0 + 1e-12)


def test_times_scale_the_bound():
    for problem in cases(20):
        slower = problem.replace(forward_s=8.0 * problem.forward_s, backward_s=8.0 * problem.backward_s,
                                 latency_s=8.0 * problem.latency_s,
                                 bandwidth_bytes_per_s=problem.bandwidth_bytes_per_s / 8.0)
        assert bound.lower_bound(slower) == pytest.approx(8.0 * bound.lower_bound(problem), rel=1e-9)


def test_names_of_devices_leave_the_bound():
    for number, problem in enumerate(cases(30)):
        renamed, _ = shuffled(np.random.default_rng(number), problem)
        upper_s = optimum(problem)
        assert bound.lower_bound(renamed, upper_s) == pytest.approx(bound.lower_bound(problem, upper_s), rel=1e-9)


def test_without_a_plan_that_fits_the_bound_is_that_without_a_limit():
    problem = random_problem(np.random.default_rng(3), K=4, L=6, S=3, memory=0.01)
    ample = problem.replace(memory_bytes=np.full(4, 1e30))
    assert bound.lower_bound(problem) == bound.lower_bound(ample) > 0.0
    assert not subset_program.feasible(subset_program.build(problem, 1e9, 1e9))


@pytest.mark.parametrize("memory", [0.5, 0.7, 0.9, 1.3])
@pytest.mark.parametrize("most_keys", [0.0, 1e9])
def test_feasible_says_whether_any_strategy_fits(memory, most_keys):
    found = set()
    for seed in range(20):
        problem = random_problem(np.random.default_rng(seed), memory=memory)
        over = [cost.overflow_bytes(problem, strategy) for strategy in all_strategies(problem)]
        found.add(min(over) == 0.0)
        assert subset_program.feasible(subset_program.build(problem, most_keys, 1e9)) == (min(over) == 0.0)
    assert memory > 1.0 or False in found


def equal_devices(K, L, S, kinds) -> Problem:
    """K devices of so many kinds, of two links: within a kind and between kinds."""
    kind = np.arange(K) * kinds // K
    alike = kind[:, None] == kind
    one = random_problem(np.random.default_rng(0), K=kinds, L=L, S=1, M=8, schedule="1f1b", transfers="blocking")
    return Problem(forward_s=one.forward_s[:, kind], backward_s=one.backward_s[:, kind], output_bytes=one.output_bytes,
                   stash_bytes=one.stash_bytes, static_bytes=one.static_bytes, gradient_bytes=one.gradient_bytes,
                   memory_bytes=one.memory_bytes[kind], bandwidth_bytes_per_s=np.where(alike, 1e10, 1e9),
                   latency_s=np.where(alike, 1e-5, 1e-4), stages=S, micro_batches=8)


def test_equal_devices_count_once():
    problem = equal_devices(K=6, L=8, S=3, kinds=2)
    sets = device_sets.make(problem)
    assert sets.members.tolist() == [[0, 1, 2], [3, 4, 5]] and len(sets.size) == 16
    assert device_sets.count(problem)[:2] == (len(sets.size), len(sets.groups))
    for x in range(16):
        inside = sets.within[sets.within_start[x]:sets.within_start[x + 1]]
        assert inside.tolist() == [g for g, y in enumerate(sets.groups) if (sets.digits[y] <= sets.digits[x]).all()]
    # the same devices, each with a link that differs in the tenth digit: no two are interchangeable
    other = problem.replace(latency_s=problem.latency_s * (1.0 + 1e-10 * np.arange(36).reshape(6, 6)))
    assert len(device_sets.types(other)) == 6
    assert bound.lower_bound(problem) == pytest.approx(bound.lower_bound(other), rel=1e-6)


def test_large_problems():
    """Sixteen devices of two kinds are within the program's reach, sixteen that all differ are not."""
    alike = equal_devices(K=16, L=24, S=8, kinds=2)
    step_s = step_time(alike, anneal.solve(alike, runs=1, moves=20_000))
    assert bound.simple_bound(alike) < bound.lower_bound(alike) <= step_s
    different = random_problem(np.random.default_rng(1), K=16, L=40, S=8, M=16)
    assert subset_program.build(different, bound.MOST_KEYS, bound.MOST_PAIRS) is None
    step_s = step_time(different, anneal.solve(different, runs=1, moves=5000))
    assert 0.0 < bound.lower_bound(different) == bound.simple_bound(different) <= step_s
