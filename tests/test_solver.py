"""The solver: valid, reproducible, never worse than its samples, within its budget; checkpoints that can be trusted."""

import hashlib
import json
import math
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import random_problem
from networks import TINY, drawn, lively, strategies
from plans import all_strategies, odd_problem, random_strategy

from nnpiper import checkpoint, cost, simulator, solver
from nnpiper.batch import Batch
from nnpiper.network import Network
from nnpiper.problem import InputError
from nnpiper.simulator import step_time, step_times
from nnpiper.solver import NNPiper
from nnpiper.starts import best_start, plain_starts

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module")
def piper() -> NNPiper:
    return NNPiper(lively())


def outcome(problem, strategy):
    return cost.overflow_bytes(problem, strategy), step_time(problem, strategy)


class Clock:
    """A clock that moves on only when told to, in place of time.perf_counter."""

    def __init__(self, monkeypatch, sampling_s, chunk_s):
        self.now, self.chunks = 100.0, 0
        monkeypatch.setattr(solver.time, "perf_counter", lambda: self.now)
        sample, run = NNPiper.sample, solver.Search.run

        def timed_sample(*arguments):
            self.now += sampling_s
            return sample(*arguments)

        def timed_run(*arguments):
            self.now += chunk_s * arguments[2] / solver.CHUNK
            self.chunks += 1
            return run(*arguments)

        monkeypatch.setattr(NNPiper, "sample", timed_sample)
        monkeypatch.setattr(solver.Search, "run", timed_run)


@given(SEEDS)
@settings(max_examples=40)
def test_valid_and_never_worse_than_its_samples(piper, seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, K=int(rng.integers(1, 9)), L=int(rng.integers(1, 12)), M=int(rng.integers(1, 12)),
                             memory=rng.choice([None, 0.5, 1.0]))
    problem = odd_problem(rng, problem) if seed % 3 == 0 else problem
    states, step_s, overflow = piper.sample(problem, 16, seed)
    sampled = [cost.decode(*(a[n] for a in states)) for n in range(len(step_s))]
    assert len(sampled) == 16 * solver.DIVISIONS
    for strategy, t, over in zip(sampled, step_s, overflow):
        strategy.check(problem)
        assert (over, t) == pytest.approx(outcome(problem, strategy), rel=1e-9)
    network_alone = piper.solve(problem, seed=seed, polish=False, samples=16)
    polished = piper.solve(problem, seed=seed, samples=16, moves=400)
    assert network_alone in sampled or overflow.min() > 0 == cost.overflow_bytes(problem, network_alone)
    assert outcome(problem, network_alone) <= min(outcome(problem, strategy) for strategy in sampled)
    assert outcome(problem, polished) <= outcome(problem, network_alone)


def test_sample_number_0_is_the_likeliest(piper):
    problem = random_problem(np.random.default_rng(0), K=6, L=20, S=4, M=4)
    one = Batch.of([problem])
    (((likeliest,),),) = strategies(one, drawn(piper.network, one, 1, greedy=True))
    for seed in range(3):
        states, _, _ = piper.sample(problem, 8, seed)
        assert cost.decode(*(a[0] for a in states)) == likeliest


def test_the_polish_finds_the_optimum_of_small_problems(piper):
    rng, gaps = np.random.default_rng(1), []
    for _ in range(10):
        problem = random_problem(rng, K=4, L=5, S=int(rng.integers(2, 5)), M=4)
        best = min(step_times(problem, *cost.encode(all_strategies(problem), 5, 4))[0])
        gaps.append(step_time(problem, piper.solve(problem, moves=20_000)) / best - 1)
        assert gaps[-1] >= -1e-9
    assert np.median(gaps) < 1e-9 and max(gaps) < 0.1


def test_feasible_where_a_feasible_plan_is_planted(piper):
    """Memory is cut to twice what a random plan needs; devices that it leaves unused have as little as any."""
    rng = np.random.default_rng(2)
    for _ in range(15):
        problem = random_problem(rng, K=5, L=10, S=int(rng.integers(2, 5)), M=5, schedule="1f1b")
        planted = random_strategy(rng, problem)
        need = cost.memory_used(problem, planted)
        tight = problem.replace(memory_bytes=2.0 * np.where(need == 0, need[need > 0].min(), need))
        assert cost.overflow_bytes(tight, planted) == 0
        assert cost.overflow_bytes(tight, piper.solve(tight)) == 0


def test_the_same_seed_gives_the_same_strategy(piper):
    problem = random_problem(np.random.default_rng(3), K=8, L=30, S=5, M=8)

    def solve(seed, **how):
        return piper.solve(problem, seed=seed, **how).text(30)

    for how in (dict(moves=300), dict(polish=False)):
        assert solve(4, **how) == solve(4, **how)
        assert len({solve(seed, **how) for seed in range(6)}) > 1
    torch.manual_seed(9)
    np.random.seed(9)
    before = solve(4, moves=300)
    torch.manual_seed(10)
    np.random.seed(10)
    assert solve(4, moves=300) == before


@pytest.mark.parametrize("sampling_s, chunk_s, budget_s", [
    (0.005, 0.001, 0.02), (0.002, 0.003, 0.02), (0.01, 1e-4, 0.1)])
def test_the_budget_is_used_and_kept(piper, monkeypatch, sampling_s, chunk_s, budget_s):
    problem = random_problem(np.random.default_rng(5), K=6, L=12, S=4, M=4)
    clock = Clock(monkeypatch, sampling_s, chunk_s)
    piper.solve(problem, budget_s=budget_s)
    assert clock.now <= 100 + budget_s + chunk_s + 1e-9
    assert clock.now >= 100 + budget_s - 2 * chunk_s


def test_a_budget_that_sampling_uses_up_gives_the_best_sample(piper, monkeypatch):
    problem = random_problem(np.random.default_rng(6), K=6, L=12, S=4, M=4)
    clock = Clock(monkeypatch, 0.05, 0.001)
    strategy = piper.solve(problem, budget_s=0.02)
    assert clock.chunks == 0 and strategy == piper.solve(problem, polish=False, samples=solver.SAMPLES)


def test_large_problems_get_fewer_samples_within_a_budget(piper, monkeypatch):
    """Sampling has no clock: all samples of 40 devices would take longer than 20 ms."""
    drawn_samples = []
    sample = NNPiper.sample
    monkeypatch.setattr(NNPiper, "sample", lambda *a: drawn_samples.append(a[2]) or sample(a[0], a[1], 4, a[3]))
    for K, S, M, budget_s in ((16, 16, 64, 0.02), (24, 8, 32, 0.02), (40, 40, 64, 0.02), (8, 8, 32, 0.0005),
                              (40, 40, 64, 1e9), (40, 40, 64, None)):
        problem = random_problem(np.random.default_rng(10), K=K, L=60, S=S, M=M)
        piper.solve(problem, budget_s=budget_s, polish=False)
    assert min(drawn_samples[:2]) > drawn_samples[2] > solver.FEWEST
    assert drawn_samples[3:] == [solver.FEWEST, solver.SAMPLES_ALONE, solver.SAMPLES_ALONE]


def test_chunks_of_long_steps_are_short(piper, monkeypatch):
    """Between two looks at the clock at most CHUNK_OPS operations are simulated."""
    counts = []
    run = solver.Search.run
    monkeypatch.setattr(solver.Search, "run", lambda self, state, moves, *rest: counts.append(moves) or run(
        self, state, moves, *rest))
    for M in (8, 4096):
        piper.solve(random_problem(np.random.default_rng(11), K=6, L=12, S=6, M=M), budget_s=1.0)
        assert max(counts) == min(solver.CHUNK, solver.CHUNK_OPS // (2 * 6 * M))
        counts.clear()


def test_a_longer_budget_is_not_worse_in_the_mean(piper, monkeypatch):
    rng, ratio = np.random.default_rng(7), []
    for _ in range(6):
        problem = random_problem(rng, K=8, L=30, S=5, M=8)
        steps = []
        for budget_s in (0.004, 0.1):
            with monkeypatch.context() as patch:
                Clock(patch, 0.001, 0.001)
                steps.append(step_time(problem, piper.solve(problem, budget_s=budget_s)))
        ratio.append(steps[1] / steps[0])
    assert np.mean(ratio) < 0.99


@pytest.mark.parametrize("budget_s", [0, 0.0, -1.0, math.nan, math.inf])
def test_budgets_that_are_none(piper, budget_s):
    with pytest.raises(InputError, match=f"budget_s: {budget_s}; allowed"):
        piper.solve(random_problem(np.random.default_rng(8)), budget_s=budget_s)


@pytest.fixture
def saved(tmp_path):
    network = lively(5, "links")
    checkpoint.save(network, tmp_path / "net.pt", {"command": "none", "steps": 0})
    return network, tmp_path / "net.pt"


def test_checkpoint_round_trip(saved):
    network, path = saved
    piper = NNPiper.from_pretrained(path)
    found = piper.network
    assert found.blind == "links" and found.size == TINY and not found.training
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), found.parameters()))
    assert not any(weight.requires_grad for weight in found.parameters())
    problem = random_problem(np.random.default_rng(9), K=6, L=9, S=3, M=3)
    assert piper.solve(problem, moves=100) == NNPiper(network).solve(problem, moves=100)
    card = json.loads(checkpoint.card_path(path).read_text())
    assert card["command"] == "none" and len(card["sha256"]) == 64


def refused(path, *parts):
    with pytest.raises(InputError) as caught:
        NNPiper.from_pretrained(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "allowed" in message and len(message.splitlines()) == 1
    assert all(part in message for part in parts)


def test_a_tampered_checkpoint_is_refused_before_it_is_unpickled(saved, monkeypatch, tmp_path):
    _, path = saved
    data = path.read_bytes()
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    for wrong in (data[:-1], data + b"\0", data[:500] + bytes([data[500] ^ 1]) + data[501:], b"", pickle.dumps(print)):
        path.write_bytes(wrong)
        refused(path, "SHA-256")


def test_a_pickle_with_code_in_it_is_refused_even_with_a_card_of_its_own(saved, tmp_path):
    class Harm:
        def __reduce__(self):
            return (pytest.fail, ("code of a checkpoint ran",))

    _, path = saved
    torch.save({"weight": Harm()}, path)
    card = json.loads(checkpoint.card_path(path).read_text())
    card["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    checkpoint.card_path(path).write_text(json.dumps(card))
    refused(path)


def test_bytes_that_are_no_checkpoint_are_refused_even_with_a_card_of_their_own(saved):
    _, path = saved
    card = json.loads(checkpoint.card_path(path).read_text())
    for data in (b"", b"x", pickle.dumps([1], 2)):
        path.write_bytes(data)
        checkpoint.card_path(path).write_text(json.dumps(card | {"sha256": hashlib.sha256(data).hexdigest()}))
        refused(path)
    checkpoint.card_path(path).write_text(json.dumps(card | {
        "sha256": hashlib.sha256(data).hexdigest(), "size": card["size"] | {"width": "wide"}}))
    refused(path)


def test_tensors_of_another_network_are_refused(saved):
    _, path = saved
    card = json.loads(checkpoint.card_path(path).read_text())
    card["size"]["width"] = 32
    checkpoint.card_path(path).write_text(json.dumps(card))
    refused(path, "width=32")


def test_missing_or_broken_files_are_refused(saved, tmp_path):
    _, path = saved
    card_path = checkpoint.card_path(path)
    card = json.loads(card_path.read_text())
    refused(tmp_path / "other.pt", "No such file")
    for text in ("", "[]", "{", json.dumps({**card, "size": {"depth": 3, "colour": 1}}), json.dumps({"sha256": "0"}),
                 "null"):
        card_path.write_text(text)
        refused(path, "cannot be read")
    card_path.unlink()
    refused(path, "No such file")
    card_path.write_text(json.dumps(card))
    path.unlink()
    refused(path, "No such file")


def test_checkpoints_are_written_whole_or_not_at_all(saved, monkeypatch):
    _, path = saved
    before = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(Network(TINY), path, {})
    assert path.read_bytes() == before and sorted(p.name for p in path.parent.iterdir()) == ["net.json", "net.pt"]


@given(SEEDS)
@settings(max_examples=30)
def test_wishes_are_kept_where_there_is_no_limit_of_memory(piper, seed):
    """Pins cost much to break, so a search of a few hundred moves finds its way to keep a single one; the most devices
    are never exceeded."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, K=int(rng.integers(2, 7)), L=int(rng.integers(3, 10)), M=4)
    most = int(rng.integers(problem.stages, problem.devices + 1))
    pins = {int(rng.integers(problem.layers)): int(rng.integers(problem.devices))}
    plan = piper.solve(problem, seed=seed, samples=8, moves=1500, pins=pins, most_devices=most)
    plan.check(problem)
    assert sum(map(len, plan.groups)) <= most
    assert solver.keeps_pins(plan, problem.layers, pins)
    (layer, device), = pins.items()
    stage = next(s for s in range(problem.stages) if layer < plan.bounds(problem.layers)[s + 1])
    assert plan.groups[stage] == (device,)


@pytest.mark.parametrize("wishes, message", [
    (dict(pins={9: 0}), "pins: layer 9 on device 0; allowed: layers 0 to 8, devices 0 to 3"),
    (dict(pins={0: -1}), "pins: layer 0 on device -1"),
    (dict(most_devices=1), "most_devices: 1; allowed: at least the number of stages, 2")])
def test_wishes_that_cannot_be_kept_are_refused(piper, wishes, message):
    problem = random_problem(np.random.default_rng(0), K=4, L=9, S=2)
    with pytest.raises(InputError, match=message):
        piper.solve(problem, **wishes)


def test_a_budget_too_small_for_the_network_goes_to_the_search(piper, monkeypatch):
    """No sample is drawn, and the plan is that of a local search from a plain start."""
    problem = random_problem(np.random.default_rng(3), K=8, L=20, S=4, M=8)
    clock = Clock(monkeypatch, sampling_s=1.0, chunk_s=1.2e-4)
    monkeypatch.setattr(NNPiper, "sample", None)
    plan = piper.solve(problem, budget_s=0.0006)
    assert clock.chunks >= 3 and clock.now <= 100.0 + 0.0006 + 1.2e-4
    plain = cost.decode(*best_start(problem, np.random.default_rng(0)))
    assert outcome(problem, plan) <= outcome(problem, plain)


def test_how_many_starts_so_many_moves_are_for():
    of = lambda K, moves: solver._startable(random_problem(np.random.default_rng(0), K=K, L=16, S=1), moves)
    assert [of(4, moves) for moves in (-1, 249, 999, 1000, 2250, 25_000)] == [1, 1, 1, 2, 3, 10]  # of 250 each
    assert [of(16, 256 * n) for n in (1, 4, 9, 100)] == [1, 2, 3, 10]  # 1.0 x 16^2


@pytest.mark.parametrize("wishes", [{}, {"most_devices": 3}, {"most_devices": 2}, {"pins": {0: 1}}])
def test_which_starts_are_polished(piper, monkeypatch, wishes):
    """The best start there is comes first, and a third of six are plain ones, but for pins, of which these know
    nothing."""
    problem = random_problem(np.random.default_rng(0), K=4, L=9, S=2)
    seen = []
    monkeypatch.setattr(solver, "HOPELESS", np.inf)
    monkeypatch.setattr(solver, "_polish", lambda search, starts, *rest: seen.extend(starts) or starts[0])
    piper.solve(problem, moves=6000, **wishes)
    known = {simulator.step_time(problem, cost.decode(*state))
             for state in zip(*plain_starts(problem, np.random.default_rng(0))[0])}
    steps = [simulator.step_time(problem, cost.decode(*state)) for state in seen]
    assert len(seen) == len(set(steps)) <= 6
    assert all(state[2][-1] <= wishes.get("most_devices", 4) for state in seen)
    if "pins" in wishes:
        assert known.isdisjoint(steps)
    if not wishes:
        assert steps[0] == min(steps) and sum(step in known for step in steps) >= 2
        monkeypatch.setattr(solver, "FEWEST_MOVES", 10**6)
        assert piper.solve(problem, moves=6000) == cost.decode(*seen[0])  # one start: the best of all, whoever made it
