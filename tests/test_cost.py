"""The cost model: cases counted by hand, and the plain second model of slow_simulator.py."""

import numpy as np
import pytest
from instances import random_problem
from plans import odd_problem, random_strategy
from slow_simulator import slow_memory, slow_stages

from nnpiper import cost
from nnpiper.batch import Batch
from nnpiper.problem import InputError, Problem, Strategy
from nnpiper.simulator import step_time


@pytest.fixture
def three_devices() -> Problem:
    """L = 3, K = 3; device 1 is twice and device 2 four times as slow as device 0; round numbers throughout."""
    forward = np.array([[1.0], [2.0], [3.0]]) * [1.0, 2.0, 4.0]
    bandwidth = np.array([[0.0, 10.0, 20.0], [40.0, 0.0, 50.0], [100.0, 25.0, 0.0]])
    return Problem(forward_s=forward, backward_s=2.0 * forward, output_bytes=[100.0, 200.0, 999.0],
                   stash_bytes=[10.0, 20.0, 30.0], static_bytes=[1000.0, 2000.0, 3000.0],
                   gradient_bytes=[300.0, 600.0, 900.0], memory_bytes=[4000.0, 4000.0, 4000.0],
                   bandwidth_bytes_per_s=bandwidth, latency_s=np.full((3, 3), 0.5), stages=2, micro_batches=4)


def test_one_device_a_stage_by_hand(three_devices):
    stages = cost.stage_arrays(three_devices, Strategy((2,), ((0,), (2,))))
    assert stages.forward_s.tolist() == [3.0, 12.0]
    assert stages.backward_s.tolist() == [6.0, 24.0]
    assert stages.send_forward_s.tolist() == [0.5 + 200.0 / 20.0]
    assert stages.send_backward_s.tolist() == [0.5 + 200.0 / 100.0]
    assert stages.all_reduce_s.tolist() == [0.0, 0.0]


def test_group_by_hand(three_devices):
    """Devices 0 and 1 take 2/3 and 1/3 of each micro-batch of layer 0, device 2 has layers 1 and 2."""
    strategy = Strategy((1,), ((0, 1), (2,)))
    stages = cost.stage_arrays(three_devices, strategy)
    np.testing.assert_allclose(stages.forward_s, [2 / 3, 20.0])
    np.testing.assert_allclose(stages.backward_s, [4 / 3, 40.0])
    # senders 0 and 1 work beside each other, receiver 2 takes both parts one after the other
    np.testing.assert_allclose(stages.send_forward_s, [(0.5 + 200 / 3 / 20) + (0.5 + 100 / 3 / 50)])
    np.testing.assert_allclose(stages.send_backward_s, [(0.5 + 200 / 3 / 100) + (0.5 + 100 / 3 / 25)])
    np.testing.assert_allclose(stages.all_reduce_s, [2 / 2 * 300 / 10 + 2 * 0.5, 0.0])
    # 1F1B, S = 2: two micro-batches in flight on stage 0, one on stage 1
    np.testing.assert_allclose(cost.memory_used(three_devices, strategy),
                               [1000 + 2 * 2 / 3 * 10, 1000 + 2 * 1 / 3 * 10, 5000 + 50])
    np.testing.assert_allclose(cost.overflow_bytes(three_devices, strategy), 1050.0)
    gpipe = three_devices.replace(schedule="gpipe")
    np.testing.assert_allclose(cost.memory_used(gpipe, strategy),
                               [1000 + 4 * 2 / 3 * 10, 1000 + 4 * 1 / 3 * 10, 5000 + 4 * 50])


def test_group_of_three_by_hand(three_devices):
    """All-reduce of three: 2 (3 - 1) / 3 of the bytes over the slowest of six directed links, four latencies."""
    strategy = Strategy((), ((0, 1, 2),))
    stages = cost.stage_arrays(three_devices.replace(stages=1), strategy)
    np.testing.assert_allclose(stages.forward_s, [6 * 4 / 7])
    np.testing.assert_allclose(stages.all_reduce_s, [4 / 3 * 1800 / 10 + 4 * 0.5])
    assert len(stages.send_forward_s) == len(stages.send_backward_s) == 0


@pytest.mark.parametrize("zero", [1e-12, 0.0])
def test_a_member_that_needs_no_time_does_all_the_work(three_devices, zero):
    """As one member's time goes to zero the group is as fast as that member alone."""
    forward = three_devices.forward_s.copy()
    forward[:, 1] = zero
    fast = three_devices.replace(forward_s=forward, backward_s=forward)
    stages = cost.stage_arrays(fast, Strategy((1,), ((0, 1), (2,))))
    assert stages.forward_s[0] == pytest.approx(0.0, abs=2e-12)
    assert cost.memory_used(fast, Strategy((1,), ((0, 1), (2,))))[:2] == pytest.approx([1000.0, 1020.0])


def test_a_group_of_equal_devices_is_n_times_as_fast():
    problem = random_problem(np.random.default_rng(0), K=4, L=3, S=1)
    equal = problem.replace(forward_s=np.repeat(problem.forward_s[:, :1], 4, 1),
                            backward_s=np.repeat(problem.backward_s[:, :1], 4, 1))
    alone = cost.stage_arrays(equal, Strategy((), ((2,),)))
    for n in (2, 3, 4):
        group = cost.stage_arrays(equal, Strategy((), (tuple(range(n)),)))
        np.testing.assert_allclose(group.forward_s, alone.forward_s / n)
        np.testing.assert_allclose(group.backward_s, alone.backward_s / n)


def test_equals_the_plain_model_on_random_cases():
    rng = np.random.default_rng(1)
    for case in range(400):
        K, L = int(rng.integers(1, 8)), int(rng.integers(1, 9))
        problem = random_problem(rng, K=K, L=L, memory=1.0)
        problem = odd_problem(rng, problem) if case % 2 else problem
        strategy = random_strategy(rng, problem)
        stages, slow = cost.stage_arrays(problem, strategy), slow_stages(problem, strategy)
        for fast_s, slow_s in ((stages.forward_s, slow.F), (stages.backward_s, slow.B),
                               (stages.send_forward_s, slow.forward_c), (stages.send_backward_s, slow.backward_c),
                               (stages.all_reduce_s, slow.all_reduce)):
            np.testing.assert_allclose(fast_s, slow_s, rtol=1e-9, atol=1e-20)
        need = slow_memory(problem, strategy)
        expected = [need.get(k, 0.0) for k in range(K)]
        np.testing.assert_allclose(cost.memory_used(problem, strategy), expected, rtol=1e-9)
        over = sum(max(0.0, expected[k] - problem.memory_bytes[k]) for k in range(K))
        assert cost.overflow_bytes(problem, strategy) == pytest.approx(over, rel=1e-9, abs=1.0)


def test_encode_decode_round_trip():
    rng = np.random.default_rng(2)
    for _ in range(100):
        problem = random_problem(rng, K=int(rng.integers(1, 9)), L=9)
        strategies = [random_strategy(rng, problem) for _ in range(5)]
        encoded = cost.encode(strategies, problem.layers, problem.devices)
        assert (np.sort(encoded[1]) == np.arange(problem.devices)).all()
        assert [cost.decode(*(a[n] for a in encoded)) for n in range(5)] == strategies


def test_batch_of_problems_equals_each_alone():
    rng = np.random.default_rng(3)
    problems = [random_problem(rng, K=5, L=7, S=3, M=4, schedule="1f1b", transfers="blocking", memory=0.7)
                for _ in range(6)]
    batch = Batch.of(problems)
    strategies = [[random_strategy(rng, problem) for _ in range(4)] for problem in problems]
    encoded = [np.stack(a) for a in zip(*(cost.encode(row, 7, 5) for row in strategies))]
    step_s, overflow = batch.step_times(*encoded)
    for a, problem in enumerate(problems):
        assert batch.problem(a).to_json() == problem.to_json()
        for n, strategy in enumerate(strategies[a]):
            assert step_s[a, n] == pytest.approx(step_time(problem, strategy), rel=1e-12)
            assert overflow[a, n] == pytest.approx(cost.overflow_bytes(problem, strategy), rel=1e-12)


def test_an_invalid_strategy_is_refused_before_every_cost(three_devices):
    for compute in (cost.stage_arrays, cost.memory_used, cost.overflow_bytes):
        with pytest.raises(InputError, match="no device twice"):
            compute(three_devices, Strategy((1,), ((0,), (0,))))


def test_matrix_rows():
    stages = cost.StageArrays(*(np.arange(n, dtype=float) + 10 * i for i, n in enumerate((3, 3, 2, 2, 3))))
    assert stages.matrix().tolist() == [[0, 1, 2], [10, 11, 12], [20, 21, 0], [30, 31, 0], [40, 41, 42]]
