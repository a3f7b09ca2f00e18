"""Schedules: what must hold of every schedule, over many S and M, odd ones first."""

import numpy as np
import pytest
from slow_simulator import slow_order

from nnpiper import schedule
from nnpiper.problem import SCHEDULES

SIZES = [(S, M) for S in (1, 2, 3, 4, 7, 8, 16) for M in (1, 2, 3, 5, 8, 31)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("S, M", SIZES)
def test_stage_order_is_the_definitions(name, S, M):
    order = schedule.stage_order(name, S, M)
    assert order.shape == (S, 2 * M, 2)
    for s in range(S):
        assert [("FB"[kind], m) for kind, m in order[s]] == slow_order(name, S, M, s)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("S, M", SIZES)
def test_program_runs_each_operation_once_after_what_it_needs(name, S, M):
    program = schedule.program(name, S, M)
    done, by_stage = set(), [[] for _ in range(S)]
    for s, kind, m in program.tolist():
        assert (s, kind, m) not in done
        if kind == schedule.F:
            assert s == 0 or (s - 1, schedule.F, m) in done
        else:
            assert (s, schedule.F, m) in done
            assert s == S - 1 or (s + 1, schedule.B, m) in done
        done.add((s, kind, m))
        by_stage[s].append([kind, m])
    assert done == {(s, kind, m) for s in range(S) for kind in (0, 1) for m in range(M)}
    assert (np.array(by_stage) == schedule.stage_order(name, S, M)).all()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("S, M", SIZES)
def test_in_flight_is_the_count_of_the_real_schedule(name, S, M):
    for s, most in enumerate(schedule.in_flight(name, S, M)):
        kept = np.cumsum([1 if kind == schedule.F else -1 for kind, _ in schedule.stage_order(name, S, M)[s]])
        assert most == kept.max()
        assert kept.min() == kept[-1] == 0


def test_program_is_shared_and_cannot_be_written():
    program = schedule.program("1f1b", 3, 4)
    assert program is schedule.program("1f1b", 3, 4)
    with pytest.raises(ValueError, match="read-only"):
        program[0, 0] = 1


def test_a_circle_is_found():
    # stage 0 wants the gradient of micro-batch 1 before it sends micro-batch 1 on
    order = np.array([[[0, 0], [1, 1], [0, 1], [1, 0]], [[0, 0], [1, 0], [0, 1], [1, 1]]])
    ops, done = schedule._merge(order)
    assert done < len(ops)


def test_text():
    assert schedule.text("gpipe", 2, 2) == "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1"
    assert schedule.text("1f1b", 3, 4).splitlines() == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3", "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"]
