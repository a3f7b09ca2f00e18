"""Annealing against the clock, on a clock of the test's own: each move takes as long as the test says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instances import random_problem

from nnpiper import cooling


def run(budget_s, most, hot=0.1, cold=0.001, pace=lambda move: 1e-6):
    """[(temperature at the start, at the end, moves, time of the end)] of all chunks from time 100 on."""
    now, moves, found = 100.0, 0, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cooling.time, "perf_counter", lambda: now)
        for (start, end), count in cooling.chunks(hot, cold, 100.0 + budget_s, most):
            now += count * pace(moves)
            moves += count
            found.append((start, end, count, now - 100.0))
    return found


@given(st.floats(1e-3, 0.5), st.integers(1, 2000), st.floats(1e-7, 1e-5))
def test_the_time_is_used_and_kept(budget_s, most, pace):
    found = run(budget_s, most, pace=lambda move: pace)
    assert found[-1][3] <= max(budget_s, min(cooling.FIRST, most) * pace) + 1e-9
    assert found[-1][3] >= budget_s - (min(most, cooling.LEAST) / cooling.CARE + 1) * pace - 1e-9
    assert all(1 <= count <= most for _, _, count, _ in found)


def test_the_temperature_falls_with_the_time_and_joins_on():
    found = run(0.01, 250)
    assert found[0][0] == 0.1 and all(start >= end for start, end, *_ in found)
    for (_, end, _, now), (start, *_) in zip(found[1:], found[2:]):
        assert start == pytest.approx(0.1 * 0.01 ** (now / 0.01)) and end == pytest.approx(start)
    assert found[-1][1] < 0.0012


def test_a_descent_stays_cold():
    assert {pair[:2] for pair in run(0.01, 250, 0.0, 0.0)} == {(0.0, 0.0)}


def test_a_time_that_has_gone_gives_nothing():
    assert run(0.0, 250) == run(-1.0, 250) == []


def test_moves_that_grow_dearer_do_not_end_late():
    """A move becomes five times as dear half way."""
    found = run(0.01, 250, pace=lambda move: 1e-6 if move < 5000 else 5e-6)
    assert found[-1][3] <= 0.01 + 250 * 4e-6 and len(found) > 20


@pytest.mark.parametrize("K, S, expected", [
    (8, 4, (0.03, 0.001)),  # at most the hottest
    (32, 4, (0.0125, 0.001)),  # hot / K
    (8, 8, (0.015625, 0.015625 / cooling.LEAST_FALL)),  # with a device a stage hot_alone / K^3
    (32, 32, (8.0 / 32**3, 8.0 / 32**3 / cooling.LEAST_FALL)),  # all below cold
    (4, 4, (0.03, 0.001))])
def test_temperatures_by_hand(K, S, expected):
    problem = random_problem(np.random.default_rng(0), K=K, S=S, L=40)
    assert cooling.temperatures(problem, hot=0.4, hottest=0.03, hot_alone=8.0, cold=0.001) == pytest.approx(expected)
