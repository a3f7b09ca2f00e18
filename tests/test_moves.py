"""The moves of the local search, each on its own: what they keep, and what they do to a state."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from instances import random_problem
from plans import random_strategy

from nnpiper import cost, moves, search, xorshift

SEEDS = st.integers(0, 2**32 - 1)


def test_uniform_is_uniform():
    """Kolmogorov's distance of 20,000 draws, below its 0.1 % point; never 0, whose logarithm is not finite."""
    state = search.random_state(np.random.default_rng(6))
    draws = np.sort([xorshift.uniform(state) for _ in range(20_000)])
    assert draws[0] > 0 and draws[-1] <= 1
    assert np.abs(draws - (np.arange(20_000) + 0.5) / 20_000).max() < 1.95 / np.sqrt(20_000)


def test_of_two_devices_the_better_linked_one_from_outside_the_group_comes():
    order, far = np.array([4, 2, 0, 1, 3]), np.zeros((5, 5))
    far[2] = [5.0, 1.0, 0.0, 3.0, 0.5]  # from device 2, at position 1, to devices 0 .. 4
    nearer = lambda i, j: moves._nearer(order, 0, 2, i, j, 2, far)  # the group is at positions 0 and 1
    assert [nearer(2, 3), nearer(3, 2), nearer(3, 4), nearer(4, 3)] == [3, 3, 3, 3]
    assert [nearer(0, 2), nearer(2, 0), nearer(1, 4), nearer(4, 1)] == [2, 2, 4, 4]


@given(SEEDS)
def test_a_move_that_is_not_made_changes_nothing_and_one_that_is_keeps_the_state_valid(seed):
    rng = np.random.default_rng(seed)
    K = int(rng.integers(1, 9))
    problem = random_problem(rng, K=K, L=int(rng.integers(K, 14)))
    state = search.proportional_state(problem, rng.permutation(K))
    random, far = search.random_state(rng), 1.0 / problem.bandwidth_bytes_per_s
    speed = search.device_speed(problem.forward_s + problem.backward_s)
    for _ in range(60):
        new = tuple(part.copy() for part in state)
        slowest = int(rng.integers(problem.stages))
        if moves.move(*state, *new, slowest, random, np.zeros(problem.stages, np.int64), speed, far, K):
            cost.decode(*new).check(problem)
            assert sorted(new[1]) == list(range(K))
            state = new
        else:
            assert all((a == b).all() for a, b in zip(state, new))


@given(SEEDS)
def test_two_stages_become_one_and_another_two(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, K=int(rng.integers(4, 10)), S=int(rng.integers(3, 5)), L=14)
    state = tuple(a[0] for a in cost.encode([random_strategy(rng, problem)], problem.layers, problem.devices))
    speed, random = search.device_speed(problem.forward_s + problem.backward_s), search.random_state(rng)
    before = stages(*state)
    for _ in range(20):
        new = tuple(part.copy() for part in state)
        if not moves._split(*state, *new, random, speed):
            continue
        after = stages(*new)
        from_ = [[s for s, (old, _) in enumerate(before) if old & devices] for devices, _ in after]
        (a, b), = (owners for owners in from_ if len(owners) == 2)
        split, = (s for s in range(len(before)) if from_.count([s]) == 2)
        ahead = from_.index([split])
        assert b == a + 1 and from_[ahead + 1] == [split]
        assert [s for owners in from_ for s in owners] == sorted([*range(len(before)), split])
        assert after[from_.index([a, b])] == (before[a][0] | before[b][0], before[a][1] + before[b][1])
        assert after[ahead][0] | after[ahead + 1][0] == before[split][0]
        for s, owners in enumerate(from_):
            assert owners in ([a, b], [split]) or after[s] == before[owners[0]]
        layers, due = before[split][1], before[split][1] * part_of(speed, after[ahead][0], before[split][0])
        assert after[ahead][1] + after[ahead + 1][1] == layers
        assert min(max(int(due), 1), layers - 1) <= after[ahead][1] <= min(int(due) + 1, layers - 1)


def stages(bounds, order, starts):
    """(devices, number of layers) of each."""
    return [(frozenset(order[a:b].tolist()), int(n)) for a, b, n in zip(starts[:-1], starts[1:], np.diff(bounds))]


def part_of(speed, some, whole):
    return speed[list(some)].sum() / speed[list(whole)].sum()
