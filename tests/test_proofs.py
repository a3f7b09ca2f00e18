"""Proven gaps, the best plans under closed forms, fits of growth: against brute force, hand counts and known laws."""

import itertools

import numpy as np
import pandas as pd
import pytest
from instances import random_problem
from networks import lively

from nnpiper import checkpoint, closed_form, cost, experiments, proofs, scaling, simulator
from nnpiper.baselines import PlannerLimit, exact
from nnpiper.closed_form import FORMS
from nnpiper.problem import InputError, Strategy


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """A checkpoint of a small network."""
    path = tmp_path_factory.mktemp("net") / "net.pt"
    checkpoint.save(lively(), path, {})
    return path


def one_device_plans(problem):
    """All strategies with one device a stage, S = K."""
    L, K = problem.layers, problem.devices
    for cuts in itertools.combinations(range(1, L), K - 1):
        for order in itertools.permutations(range(K)):
            yield Strategy(cuts, tuple((k,) for k in order))


def formula_of(form, problem, plan):
    return closed_form.formula(form, cost.stage_arrays(problem, plan), problem.micro_batches)


@pytest.mark.parametrize("form", FORMS)
def test_the_best_plan_by_a_formula_is_that_of_brute_force(form):
    for seed in range(24):
        rng = np.random.default_rng(seed)
        K = int(rng.integers(1, 5))
        problem = random_problem(rng, K=K, L=6, S=K, transfer_share=(0.05, 0.3, 2.0)[seed % 3],
                                 memory=1.4 if seed % 2 else None)
        found = closed_form.solve(problem, form)
        plans = [plan for plan in one_device_plans(problem) if cost.overflow_bytes(problem, plan) == 0]
        if plans:
            assert cost.overflow_bytes(problem, found) == 0
        least = min(formula_of(form, problem, plan) for plan in plans or one_device_plans(problem))
        assert formula_of(form, problem, found) == pytest.approx(least, rel=1e-9)


def test_forms_by_hand_and_by_the_other_code():
    stages = cost.StageArrays(np.array([1.0, 2, 1]), np.array([2.0, 2, 3]), np.array([0.5, 0.1]), np.array([0.25, 0.2]),
                              np.zeros(3))
    once = 3 + 4 + 4 + 0.75 + 0.3
    expected = {"compute alone": 4.0, "compute + next boundary": 4.3, "compute + own sends": 4.35,
                "compute + both boundaries": 5.05}
    for form, largest in expected.items():
        assert closed_form.formula(form, stages, 5) == pytest.approx(once + 4 * largest)
    for form, value in experiments.closed_forms(stages, 5).items():
        assert closed_form.formula(form, stages, 5) == pytest.approx(value)


def test_a_formula_needs_a_device_a_stage():
    problem = random_problem(np.random.default_rng(0), K=3, L=5, S=2)
    with pytest.raises(InputError, match="stages: 2 on 3 devices; allowed: one device a stage"):
        closed_form.solve(problem, "compute alone")


def test_without_transfers_a_formula_does_not_see_the_order_but_the_step_does():
    """What the notebook says: a slow first stage hides how the pipeline fills and drains."""
    steps, formulas = {}, set()
    for order in itertools.permutations((3.0, 1.0, 1.0)):
        work = np.array(order)
        stages = cost.StageArrays(work / 3, 2 * work / 3, np.zeros(2), np.zeros(2), np.zeros(3))
        steps[order] = simulator.simulate(stages, "1f1b", 8, "overlapped")
        formulas.add(round(closed_form.formula("compute alone", stages, 8), 9))
    assert formulas == {5 + 7 * 3}
    assert steps[3.0, 1.0, 1.0] == pytest.approx(24.0) and steps[1.0, 1.0, 3.0] == pytest.approx(26.0)


def test_optimum_is_the_exact_planners():
    for seed in range(12):
        problem = random_problem(np.random.default_rng(seed), K=4, L=7, memory=2.5 if seed % 3 == 0 else None)
        expected = exact.solve(problem)
        if cost.overflow_bytes(problem, expected) > 0:
            continue
        found = proofs.optimum(problem)
        assert cost.overflow_bytes(problem, found) == 0
        assert simulator.step_time(problem, found) == pytest.approx(simulator.step_time(problem, expected), rel=1e-9)


def test_what_is_out_of_reach_is_not_proven(net):
    problem = random_problem(np.random.default_rng(0), K=24, L=40, S=12, M=4)
    with pytest.raises(PlannerLimit, match="24 devices in 12 stages are out of reach"):
        proofs.optimum(problem)
    trial = proofs.Trial("proofs", 24, 12, "completely_heterogeneous", "1f1b", "blocking")
    row, = proofs.prove_and_plan(trial, net)
    assert row["planner"] == proofs.OPTIMUM and not row["feasible"]


def test_rows_of_a_trial(net):
    trial, = (t for t in proofs.proof_trials() if (t.devices, t.environment, t.schedule, t.transfers, t.number)
              == (4, "completely_heterogeneous", "1f1b", "overlapped", 1))
    rows = pd.DataFrame(proofs.prove_and_plan(trial, net))
    assert list(rows["planner"]) == [proofs.OPTIMUM, *proofs.solvers(net), *FORMS]
    gaps = proofs.with_gaps(rows)
    assert gaps["gap"].iloc[0] == 0.0 and gaps["gap"].notna().sum() == rows["feasible"].sum()
    first = rows.iloc[0]
    assert first["bound_s"] <= first["step_s"] * (1 + 1e-9) and first["unlimited_s"] <= first["step_s"] * (1 + 1e-9)
    table = proofs.proof_table(rows)
    assert table[["problems", "proven"]].values.tolist() == [[1, 1]]
    forms = rows[rows["planner"].isin(FORMS)]
    assert (forms["promised_s"] > 0).all()


def test_the_trials_are_enough_and_no_other_studys():
    trials = proofs.proof_trials()
    assert len(trials) == len(set(trials)) == 280
    assert {trial.set for trial in trials + proofs.link_trials(3)}.isdisjoint(proofs.testset.SETS)
    for schedule, transfers in itertools.product(("1f1b", "gpipe"), ("blocking", "overlapped")):
        assert sum((t.schedule, t.transfers) == (schedule, transfers) for t in trials) == 70


def table(*rows):
    """(trial number, planner, step, feasible)"""
    frame = pd.DataFrame(rows, columns=["number", "planner", "step_s", "feasible"])
    return frame.assign(devices=4, stages=4, environment="e", schedule="1f1b", transfers="blocking", promised_s=np.nan)


def test_gap_table_by_hand():
    rows = table((0, proofs.OPTIMUM, 2.0, True), (0, "a", 2.0, True), (0, "b", 3.0, True),
                 (1, proofs.OPTIMUM, 1.0, True), (1, "a", 1.1, True), (1, "b", 0.5, False),
                 (2, proofs.OPTIMUM, 4.0, True), (2, "a", 4.2, True), (2, "b", np.nan, False),
                 (3, proofs.OPTIMUM, np.nan, False))
    made = proofs.gap_table(proofs.with_gaps(rows)).set_index("planner")
    columns = ["problems", "beyond its limit", "over memory", "mean gap [%]", "median [%]", "worst [%]", "optimal [%]"]
    assert made.loc["a", columns].tolist() == pytest.approx([3, 0, 0, 5, 5, 10, 100 / 3])
    assert made.loc["b", columns].tolist() == pytest.approx([3, 1, 1, 50, 50, 50, 0])
    assert made.loc["a", "low"] < 5 < made.loc["a", "high"]
    assert list(proofs.gap_table(proofs.with_gaps(rows), ("devices",))["devices"]) == [4, 4]


def test_a_plan_below_the_optimum_is_an_error():
    rows = table((0, proofs.OPTIMUM, 2.0, True), (0, "a", 1.9, True))
    with pytest.raises(AssertionError, match="1.9"):
        proofs.with_gaps(rows)
    proofs.with_gaps(table((0, proofs.OPTIMUM, 2.0, True), (0, "a", 1.9, False)))  # it does not fit


def test_form_table_by_hand():
    form = "compute alone"
    rows = proofs.with_gaps(table((0, proofs.OPTIMUM, 2.0, True), (0, form, 2.2, True), (1, proofs.OPTIMUM, 1.0, True),
                                  (1, form, 1.0, True)))
    rows.loc[rows["planner"] == form, "promised_s"] = [2.0, 1.25]
    row = proofs.form_table(rows).iloc[0]
    assert row[["loss [%]", "worst [%]", "optimal [%]", "exact over promised [%]"]].tolist() == pytest.approx(
        [5, 10, 50, (10 - 20) / 2])


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_links_are_brought_to_a_ratio(ratio):
    problem = random_problem(np.random.default_rng(2), K=5, L=9, S=5)
    made = proofs.at_ratio(problem, ratio)
    alone = (made.forward_s + made.backward_s).sum(axis=0)
    mean = np.mean([made.latency_s[g, h] + size / made.bandwidth_bytes_per_s[g, h] for g in range(5) for h in range(5)
                    for size in made.output_bytes[:-1] if g != h])
    assert mean * (1 / alone).sum() == pytest.approx(ratio, rel=1e-6, abs=1e-8)


def test_mislead(net):
    rows = pd.DataFrame(proofs.mislead((proofs.link_trials(1, K=4)[0], 0.2), net))
    assert len(rows) == 2 * (len(FORMS) + 1) and (rows["loss"] >= 0).all()
    assert (rows["over promised"].notna() == rows["planner"].isin(FORMS)).all()


def test_limits_hold_and_are_reached():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        S, M = int(rng.integers(1, 7)), int(rng.integers(1, 20))
        stages = experiments.random_stages(rng, S, float(rng.choice([0.1, 1.0, 3.0]))) if S > 1 else cost.StageArrays(
            np.ones(1), np.ones(1), np.zeros(0), np.zeros(0), np.zeros(1))
        least = max(proofs.limits(stages, M).values())
        assert least <= simulator.simulate(stages, "1f1b", M, "overlapped") * (1 + 1e-9)
    # two stages, far apart: two micro-batches in flight make M / 2 trips in turn, and nothing else takes time
    stages = cost.StageArrays(np.array([1e-3, 1e-3]), np.array([1e-3, 1e-3]), np.array([5.0]), np.array([5.0]),
                              np.zeros(2))
    assert proofs.limits(stages, 8)["round trips"] == pytest.approx(4 * 10.004)
    assert simulator.simulate(stages, "1f1b", 8, "overlapped") == pytest.approx(4 * 10.004, rel=0.3)


def test_a_power_law_is_found():
    x = np.array([2.0, 4, 8, 16, 32])
    fit = scaling.power_law(x, 3.0 * x**1.7)
    assert [fit[name] for name in ("exponent", "low", "high", "coefficient")] == pytest.approx([1.7, 1.7, 1.7, 3.0])
    y = 3.0 * x**1.7 * np.exp([0.1, -0.2, 0.05, 0.1, -0.05])
    fit = scaling.power_law(x, y)
    # numpy's polynomial fit scales its covariance by the same residual variance
    (slope, _), covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    assert fit["exponent"] == pytest.approx(slope)
    assert fit["high"] - fit["exponent"] == pytest.approx(3.1824 * covariance[0, 0] ** 0.5, rel=1e-4)


def test_quantiles_are_those_of_the_tables():
    published = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 8: 2.306, 10: 2.228, 16: 2.120, 30: 2.042,
                 120: 1.980}
    for freedom, value in published.items():
        assert scaling.t_quantile(freedom) == pytest.approx(value, abs=2e-3)


def test_growth_table_by_hand():
    rows = pd.DataFrame([{"part": "p", "changed": "devices", "size": size, "cpu_s": factor * size**2.0}
                         for size in (4, 8, 16) for factor in (1.0, 1.1, 0.9)])
    row = scaling.growth_table(rows).iloc[0]
    assert row[["against", "from", "to", "first", "last"]].tolist() == ["K", 4, 16, 16.0, 256.0]
    assert row["exponent"] == pytest.approx(2.0) and row["low"] < 2.0 < row["high"]
    assert row["exponent at the end"] == pytest.approx(2.0)


def test_times_and_memory_are_measured(net):
    size = scaling.Size(4, 3, 8, 6)
    rows = pd.DataFrame(scaling.part_times(size, net, numbers=2, repeats=1))
    assert list(rows["part"]) == [*scaling.PARTS] * 2 and (rows["cpu_s"] > 0).all()
    times = rows.groupby("part")["cpu_s"].max()
    assert times["one move"] < times["sampling"] and times["one simulation"] < times["solve"]
    assert [row["part"] for row in scaling.bound_times(size, 2, 1)] == [scaling.BOUND] * 2
    assert scaling.bound_times(scaling.Size(40, 20, 60, 4), 1, 1) == []  # out of reach
    small, large = scaling.peak_memories([size, scaling.Size(64, 8, 50, 8)], net)
    assert 0.0 < small < large < 1000.0
