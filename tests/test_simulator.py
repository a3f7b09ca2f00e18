"""The simulator: the plain second simulator of slow_simulator.py, closed forms, bounds, monotony, the timeline."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from instances import random_problem
from plans import odd_problem, random_strategy
from slow_simulator import SlowStages, slow_bound, slow_stages, slow_step

from nnpiper import cost, schedule, simulator
from nnpiper.cost import StageArrays
from nnpiper.problem import SCHEDULES, TRANSFERS, Strategy

SEEDS = st.integers(0, 2**32 - 1)


def case(rng, odd=False, **given_sizes):
    """A problem of up to 7 devices, 9 layers and 20 micro-batches, and a strategy with groups and unused devices."""
    sizes = {"K": int(rng.integers(1, 8)), "L": int(rng.integers(1, 10)), "M": int(rng.integers(1, 21)),
             "transfer_share": float(rng.choice([1e-6, 0.05, 0.3, 1.0, 30.0])), "memory": 1.0} | given_sizes
    problem = random_problem(rng, **sizes)
    problem = odd_problem(rng, problem) if odd else problem
    return problem, random_strategy(rng, problem)


def arrays(F, B, forward_c=(), backward_c=(), all_reduce=None):
    F = np.array(F, float)
    all_reduce = np.zeros(len(F)) if all_reduce is None else all_reduce
    return StageArrays(F, np.array(B, float), np.array(forward_c, float), np.array(backward_c, float),
                       np.array(all_reduce, float))


def test_equals_the_plain_simulator_on_random_cases():
    rng = np.random.default_rng(0)
    seen = dict.fromkeys(["S = 1", "M = 1", "M < S", "group", "unused", *SCHEDULES, *TRANSFERS], 0)
    for number in range(1500):
        problem, strategy = case(rng, odd=number % 3 == 0)
        S, M = problem.stages, problem.micro_batches
        slow, _, _ = slow_step(slow_stages(problem, strategy), M, problem.schedule, problem.transfers)
        assert simulator.step_time(problem, strategy) == pytest.approx(slow, rel=1e-9, abs=1e-20)
        used = sum(map(len, strategy.groups))
        for kind, found in (("S = 1", S == 1), ("M = 1", M == 1), ("M < S", M < S), ("group", used > S),
                            ("unused", used < problem.devices), (problem.schedule, True), (problem.transfers, True)):
            seen[kind] += found
    assert min(seen.values()) >= 50, seen


def test_equals_the_plain_simulator_on_deep_pipelines_and_stage_times_of_all_sizes():
    """Stage arrays without a problem behind them: up to 16 stages, times over 12 orders of magnitude, exact zeros."""
    rng = np.random.default_rng(1)
    for _ in range(400):
        S, M = int(rng.integers(1, 17)), int(rng.integers(1, 25))
        times = [np.where(rng.random(n) < 0.2, 0.0, 10.0 ** rng.uniform(*rng.choice([[-6, 6], [-0.3, 0.3]]), n))
                 for n in (S, S, S - 1, S - 1, S)]
        for name in SCHEDULES:
            for transfers in TRANSFERS:
                slow, _, _ = slow_step(SlowStages(*times), M, name, transfers)
                assert simulator.simulate(StageArrays(*times), name, M, transfers) == pytest.approx(slow, rel=1e-9)


@pytest.mark.parametrize("transfers", TRANSFERS)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("S, M", [(1, 1), (1, 7), (2, 1), (4, 3), (4, 4), (8, 32), (16, 5)])
def test_equal_stages_without_transfers(name, transfers, S, M):
    """(M + S - 1)(F + B), Huang et al. 2019 and Narayanan et al. 2021: a bubble of S - 1 slots."""
    F, B = 3.0, 5.0
    step = simulator.simulate(arrays([F] * S, [B] * S, [0] * (S - 1), [0] * (S - 1)), name, M, transfers)
    assert step == pytest.approx((M + S - 1) * (F + B), rel=1e-12)


@pytest.mark.parametrize("S, M", [(2, 1), (3, 4), (8, 3)])
def test_gpipe_with_equal_stages_and_transfers(S, M):
    """Equal stages with a transfer c <= F, B each way. Overlapped: the bubble also holds 2 (S - 1) c. Blocking: the
    last stage starts after S - 1 hops of F + c and is fed every F + c, its neighbour's pace; the way back is alike."""
    F, B, c = 4.0, 6.0, 1.5
    stages = arrays([F] * S, [B] * S, [c] * (S - 1), [c] * (S - 1))
    overlapped = (M + S - 1) * (F + B) + 2 * (S - 1) * c
    assert simulator.simulate(stages, "gpipe", M, "overlapped") == pytest.approx(overlapped, rel=1e-12)
    blocking = (M + S - 2) * (F + c) + F + (M + S - 2) * (B + c) + B
    assert simulator.simulate(stages, "gpipe", M, "blocking") == pytest.approx(blocking, rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfers", TRANSFERS)
def test_one_micro_batch_goes_there_and_back(name, transfers):
    """M = 1 leaves no choice: sum of F, B and both transfers."""
    rng = np.random.default_rng(6)
    for S in (1, 2, 9):
        stages = arrays(*rng.uniform(0, 1, (2, S)), *rng.uniform(0, 1, (2, S - 1)))
        assert simulator.simulate(stages, name, 1, transfers) == pytest.approx(stages.matrix().sum())


def test_by_hand():
    """S = 2, M = 2, 1F1B: F 1 and 2, B 3 and 4, activation 0.5, gradient 0.25, all-reduce 10 on stage 0.

    blocking: 0F0 0-1, sent 1.5; 1F0 1.5-3.5; 0F1 1.5-2.5, sent 3; 1B0 3.5-7.5, sent 7.75; 1F1 7.75-9.75;
    0B0 7.75-10.75; 1B1 9.75-13.75, sent 14; 0B1 14-17; all-reduce to 27.
    overlapped: 1F1 starts at 7.5, 1B1 9.5-13.5, gradient 13.75, 0B1 13.75-16.75."""
    stages = arrays([1, 2], [3, 4], [0.5], [0.25], [10, 0])
    assert simulator.simulate(stages, "1f1b", 2, "blocking") == 27.0
    assert simulator.simulate(stages, "1f1b", 2, "overlapped") == 26.75


def test_all_reduce_runs_beside_other_stages():
    """Stage 1 reduces while stage 0 still works: only the later end counts."""
    assert simulator.simulate(arrays([1, 1], [2, 2], [0], [0], [0, 1.5]), "1f1b", 1, "blocking") == 6.0
    assert simulator.simulate(arrays([1, 1], [2, 2], [0], [0], [0, 5.0]), "1f1b", 1, "blocking") == 9.0


@given(SEEDS)
def test_no_step_falls_under_the_bounds(seed):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        problem, strategy = case(rng, odd=rng.random() < 0.3)
        step_s, below = simulator.step_time(problem, strategy), simulator.lower_bound(problem, strategy)
        design = slow_bound(slow_stages(problem, strategy), problem.micro_batches, problem.schedule)
        assert step_s >= below * (1 - 1e-9)
        assert step_s >= design * (1 - 1e-9)
        assert below >= design * (1 - 1e-9)  # the package's bound is at least as sharp


@given(SEEDS)
def test_the_bound_of_gpipe_is_its_step(seed):
    """The flow shop's closed form against the plain simulator, odd costs (zeros, equal times) among them."""
    rng = np.random.default_rng(seed)
    for _ in range(10):
        problem, strategy = case(rng, odd=rng.random() < 0.3, schedule="gpipe")
        step_s = slow_step(slow_stages(problem, strategy), problem.micro_batches, "gpipe", problem.transfers)[0]
        assert simulator.lower_bound(problem, strategy) == pytest.approx(step_s, rel=1e-12)


def test_bound_is_sharp_somewhere():
    """One stage, and equal stages with one micro-batch: no gap."""
    rng = np.random.default_rng(2)
    for sizes in (dict(K=3, S=1), dict(K=5, L=5, S=5, M=1)):
        problem, strategy = case(rng, **sizes)
        assert simulator.lower_bound(problem, strategy) == pytest.approx(simulator.step_time(problem, strategy))


@given(SEEDS, st.sampled_from(TRANSFERS))
def test_more_bandwidth_or_speed_never_makes_a_gpipe_step_longer(seed, transfers):
    """One device a stage: a faster device or link only shortens times (a faster member of a group shifts work)."""
    rng = np.random.default_rng(seed)
    K = int(rng.integers(1, 7))
    problem = random_problem(rng, K=K, L=8, M=int(rng.integers(1, 12)), schedule="gpipe", transfers=transfers)
    strategy = Strategy(random_strategy(rng, problem).cuts, tuple((k,) for k in rng.permutation(K)[:problem.stages]))
    before = simulator.step_time(problem, strategy)
    faster = rng.random(K) < 0.5
    speed = np.where(faster, rng.uniform(1, 4, K), 1.0)
    link = np.where(rng.random((K, K)) < 0.5, rng.uniform(1, 4, (K, K)), 1.0)
    quicker = problem.replace(forward_s=problem.forward_s / speed, backward_s=problem.backward_s / speed)
    wider = problem.replace(bandwidth_bytes_per_s=problem.bandwidth_bytes_per_s * link,
                            latency_s=problem.latency_s / link)
    for better in (quicker, wider):
        assert simulator.step_time(better, strategy) <= before * (1 + 1e-12)


@given(SEEDS, st.sampled_from(SCHEDULES), st.floats(1e-6, 1e6))
def test_step_grows_with_the_clock(seed, name, factor):
    """All times longer by a factor: so is the step. One more micro-batch: never shorter."""
    problem, strategy = case(np.random.default_rng(seed), schedule=name)
    stages = cost.stage_arrays(problem, strategy)
    step_s = simulator.simulate(stages, name, problem.micro_batches, problem.transfers)
    slower = StageArrays(*(factor * getattr(stages, field) for field in StageArrays.__dataclass_fields__))
    assert simulator.simulate(slower, name, problem.micro_batches, problem.transfers) == pytest.approx(factor * step_s)
    assert simulator.simulate(stages, name, problem.micro_batches + 1, problem.transfers) >= step_s


@given(SEEDS)
def test_timeline_is_consistent(seed):
    problem, strategy = case(np.random.default_rng(seed))
    S, M = problem.stages, problem.micro_batches
    line, stages = simulator.timeline(problem, strategy), cost.stage_arrays(problem, strategy)
    close = 1e-9 * line.step_s
    assert line.step_s == simulator.step_time(problem, strategy)
    assert np.allclose(line.end_s[0] - line.start_s[0], stages.forward_s[:, None], atol=close)
    assert np.allclose(line.end_s[1] - line.start_s[1], stages.backward_s[:, None], atol=close)
    assert line.send_s[0].tolist() == [*stages.send_forward_s, 0.0]
    assert line.send_s[1].tolist() == [0.0, *stages.send_backward_s]
    leave = line.arrive_s - line.send_s[:, :, None]
    assert (leave >= line.end_s - close).all()  # nothing is sent before it is computed
    assert (leave[:, :, 1:] >= line.arrive_s[:, :, :-1] - close).all() or S == 1  # in order, one at a time
    assert (line.start_s[0, 1:] >= line.arrive_s[0, :-1] - close).all()
    assert (line.start_s[1, :-1] >= line.arrive_s[1, 1:] - close).all()
    for s, order in enumerate(schedule.stage_order(problem.schedule, S, M)):
        kind, m = order.T
        free = line.arrive_s if problem.transfers == "blocking" else line.end_s
        assert (line.start_s[kind, s, m][1:] >= free[kind, s, m][:-1] - close).all()
    last = line.arrive_s if problem.transfers == "blocking" else line.end_s
    assert line.step_s == pytest.approx((last.max(axis=(0, 2)) + line.all_reduce_s).max(), rel=1e-12)
    busy = M * (stages.forward_s + stages.backward_s)
    assert np.allclose(line.idle_share, 1 - busy / line.step_s)


def test_timeline_equals_the_plain_simulators_log():
    rng = np.random.default_rng(3)
    for _ in range(60):
        problem, strategy = case(rng)
        line = simulator.timeline(problem, strategy)
        _, operations, sent = slow_step(slow_stages(problem, strategy), problem.micro_batches, problem.schedule,
                                        problem.transfers)
        for s, kind, m, start, end in operations:
            assert line.start_s["FB".index(kind), s, m] == pytest.approx(start, rel=1e-9)
            assert line.end_s["FB".index(kind), s, m] == pytest.approx(end, rel=1e-9)
        for s, kind, m, start, end in sent:
            assert line.arrive_s["FB".index(kind), s, m] == pytest.approx(end, rel=1e-9)


def test_batched_equals_single_whatever_the_threads():
    rng = np.random.default_rng(4)
    for _ in range(20):
        problem, _ = case(rng)
        strategies = [random_strategy(rng, problem) for _ in range(17)]
        encoded = cost.encode(strategies, problem.layers, problem.devices)
        step_s, overflow = simulator.step_times(problem, *encoded)
        assert step_s == pytest.approx([simulator.step_time(problem, strategy) for strategy in strategies], rel=1e-12)
        assert overflow == pytest.approx([cost.overflow_bytes(problem, strategy) for strategy in strategies])
        again, again_overflow = simulator.step_times(problem, *encoded, threads=2)
        assert (again == step_s).all() and (again_overflow == overflow).all()


def test_scratch_left_by_one_simulation_does_not_reach_the_next():
    rng = np.random.default_rng(5)
    ops, space = simulator.op_table("1f1b", 4, 9), simulator.workspace(4, 9)
    every = [arrays(*rng.uniform(0, 1, (2, 4)), *rng.uniform(0, 1, (2, 3)), rng.uniform(0, 1, 4)) for _ in range(20)]
    alone = [simulator.simulate(stages, "1f1b", 9, "overlapped") for stages in every]
    assert [simulator.run_step(ops, stages.matrix(), False, space) for stages in every] == alone


@given(SEEDS)
def test_closed_form(seed):
    """The formula of Alpa, AMP and Metis, counted plainly; exact for one micro-batch and for one stage."""
    rng = np.random.default_rng(seed)
    problem, strategy = case(rng, memory=None)
    stages, M = cost.stage_arrays(problem, strategy), problem.micro_batches
    slow = slow_stages(problem, strategy)
    work = [f + b for f, b in zip(slow.F, slow.B)]
    plain = math.fsum(work) + math.fsum(slow.forward_c) + math.fsum(slow.backward_c) + (M - 1) * max(work)
    assert simulator.closed_form(stages, M) == pytest.approx(plain)
    bare = StageArrays(stages.forward_s, stages.backward_s, stages.send_forward_s, stages.send_backward_s,
                       np.zeros(problem.stages))
    if M == 1 or problem.stages == 1:
        assert simulator.simulate(bare, problem.schedule, M, problem.transfers) == pytest.approx(plain)
