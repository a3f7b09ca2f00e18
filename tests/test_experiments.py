"""Experiments, statistics and charts: cases are the same everywhere, gains and intervals are what they say, the closed
forms agree with the exact simulator, training reads no data, every claim has its number."""

import itertools
import json
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from instances import random_problem
from networks import lively

from nnpiper import checkpoint, claims, cost, experiments, insight, plots, simulator, statistics
from nnpiper.baselines import PLANNERS, alpa_hetero
from nnpiper.cluster import ENVIRONMENTS
from nnpiper.cost import StageArrays
from nnpiper.experiments import COMPARED, GPT_MODELS, OTHER_MODELS, REFERENCE, SORTED, Case
from nnpiper.paths import DATA
from nnpiper.problem import SHAPES, TRANSFERS
from nnpiper.statistics import BEST_PROGRAM
from nnpiper.workload import MODELS

CASE = Case("gpt2", "completely_heterogeneous", devices=4, stages=3, number=0)


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """A checkpoint of a small network."""
    path = tmp_path_factory.mktemp("net") / "net.pt"
    checkpoint.save(lively(), path, {})
    return path


def same(a, b):
    return all((getattr(a, name) == getattr(b, name)).all() for name in SHAPES)


def test_a_case_is_one_problem():
    assert same(CASE.problem(), CASE.problem())
    others = [Case("gpt2", "completely_heterogeneous", 4, 3, 1), Case("gpt2", "heterogeneous_compute", 4, 3, 0)]
    assert not any(same(CASE.problem(), other.problem()) for other in others)
    # on record: a case that changes makes every table of the repository stale
    assert CASE.problem().memory_bytes.tolist() == pytest.approx([43.2e9, 21.6e9, 28.8e9, 21.6e9])
    assert CASE.problem().micro_batches == 12


def test_the_case_lists_are_the_promised_ones():
    assert set(GPT_MODELS) | set(OTHER_MODELS) <= set(MODELS)
    made = experiments.cases(GPT_MODELS, ENVIRONMENTS, [(8, 8), (8, 4)], count=50)
    counts = pd.DataFrame([case.fields for case in made]).groupby(["model", "environment"]).size()
    assert len(counts) == 20 and (counts == 100).all() and len(set(made)) == len(made)


@pytest.mark.parametrize("environment", ["virtual", "virtual wide"])
def test_virtual_cases(environment):
    problem = Case("virtual", environment, 6, 3, 0, layers=20).problem()
    assert (problem.devices, problem.stages, problem.layers, problem.micro_batches) == (6, 3, 20, 12)


def test_wide_instances_are_wider_than_any_in_training():
    def spread(environment):
        speeds = [experiments.relative_speeds(Case("virtual", environment, 12, 12, n, layers=30).problem())
                  for n in range(20)]
        return max(1 / speed.min() for speed in speeds)

    assert spread("virtual wide") > np.exp(2 * 2.0) * np.exp(2 * 0.15) > spread("virtual")


def test_a_case_with_another_number_of_blocks():
    assert Case("gpt2", "homogeneous", 2, 2, 0, layers=30).problem().layers == 32


def test_processes_change_nothing_and_keep_the_order(net):
    cases = experiments.cases(["gpt2"], ["completely_heterogeneous", "realistic"], [(4, 3)], 2)
    compare = partial(experiments.compare, checkpoint=net, planners=("even", REFERENCE))
    alone = list(experiments.each(compare, cases, workers=1))
    assert list(experiments.each(compare, cases, workers=2)) == alone
    assert [(rows[0]["environment"], rows[0]["number"]) for rows in alone] == [
        (case.environment, case.number) for case in cases]


def test_rows_are_what_the_exact_simulator_says(net):
    rows = pd.DataFrame(experiments.compare(CASE, net))
    assert list(rows.planner[:len(COMPARED)]) == list(COMPARED)
    assert len(rows) == len(TRANSFERS) * (len(COMPARED) + 2)
    problem = CASE.problem()
    for transfers in TRANSFERS:
        row = rows[(rows.planner == "metis") & (rows.transfers == transfers)].iloc[0]
        plan = PLANNERS["metis"](problem.replace(transfers=transfers))
        assert row.plan == plan.text(problem.layers)
        assert row.step_s == simulator.step_time(problem.replace(transfers=transfers), plan)
        assert row.feasible == (cost.overflow_bytes(problem, plan) == 0)


@pytest.mark.parametrize("name", [name for name in COMPARED if name != SORTED])
def test_classical_planners_do_not_know_the_transfer_mode(name):
    """`compare` lets them plan once for both."""
    rng = np.random.default_rng(5)
    for _ in range(4):
        problem = random_problem(rng, K=4, L=8, S=3, M=6, schedule="1f1b", memory=3.0)
        assert len({PLANNERS[name](problem.replace(transfers=mode)) for mode in TRANSFERS}) == 1


def test_a_planner_beyond_its_cap_has_no_row(net):
    case = Case("gpt2-xl", "completely_heterogeneous", 20, 4, 0)
    rows = experiments.compare(case, net, planners=("even", "pipeedge"), transfers=("blocking",))
    assert [row["planner"] for row in rows] == ["even", "nnpiper", "network"]


def test_the_sorted_reference_is_the_reference_on_that_order():
    problem = random_problem(np.random.default_rng(1), K=4, L=7, S=4, M=6, schedule="1f1b", transfers="blocking")
    strategy = experiments.solve_sorted(problem)
    strategy.check(problem)
    value = alpa_hetero.objective(problem, strategy)
    slowest_first = np.argsort(experiments.relative_speeds(problem))
    assert [group[0] for group in strategy.groups] == slowest_first.tolist()
    values = {}
    for order in itertools.permutations(range(4)):
        view = experiments.permuted(problem, np.array(order))
        values[order] = alpa_hetero.objective(view, PLANNERS[REFERENCE](view))
    assert value == pytest.approx(values[tuple(slowest_first)], rel=1e-9)
    assert min(values.values()) <= value * (1 + 1e-9)


def test_permuted_devices_have_the_same_step():
    problem = random_problem(np.random.default_rng(2), K=4, L=6, S=3)
    order = np.array([2, 0, 3, 1])
    plan = PLANNERS["even"](experiments.permuted(problem, order))
    renamed = type(plan)(plan.cuts, tuple(tuple(int(order[k]) for k in group) for group in plan.groups))
    assert simulator.step_time(experiments.permuted(problem, order), plan) == simulator.step_time(problem, renamed)


# closed forms

def test_closed_forms_are_exact_where_they_should_be():
    S, M = 5, 12
    equal = StageArrays(np.ones(S), 2 * np.ones(S), np.zeros(S - 1), np.zeros(S - 1), np.zeros(S))
    step = simulator.simulate(equal, "1f1b", M, "blocking")
    assert step == 3 * (M + S - 1)
    assert set(experiments.closed_forms(equal, M).values()) == {step}
    two = StageArrays(*(np.array(a, float) for a in ([1, 1], [2, 2], [0.5], [0.25], [0, 0])))
    forms = experiments.closed_forms(two, 3)
    # C = 3 each, c = 0.75: once 6.75; the slowest 3, 3.75, and 3.5 (stage 0 sends 0.5, stage 1 sends 0.25)
    assert forms == {"compute alone": 12.75, "compute + next boundary": 14.25, "compute + own sends": 13.75}


def test_random_stages_have_the_wanted_ratio():
    stages = experiments.random_stages(np.random.default_rng(0), 8, 0.3)
    sends = np.concatenate([stages.send_forward_s, stages.send_backward_s])
    assert sends.mean() == pytest.approx(0.3 * (stages.forward_s + stages.backward_s).mean())


def test_closed_form_errors_have_the_known_signs():
    rows = pd.DataFrame(experiments.closed_form_errors(1.0, S=8, M=32, plans=20))
    mean = rows.groupby(["transfers", "form"]).error.mean()
    assert mean["blocking", "compute alone"] < -30 and mean["overlapped", "compute alone"] < -20
    assert abs(mean["blocking", "compute + own sends"]) < 10


# statistics

def table(steps, feasible=None, transfers="blocking", stages=3):
    """Rows of problems: {planner: [step of each problem]}."""
    feasible = feasible or {}
    return pd.DataFrame([
        {"model": "m", "environment": "e", "devices": 4, "stages": stages, "number": n, "transfers": transfers,
         "planner": planner, "step_s": step, "feasible": feasible.get(planner, [True] * 9)[n]}
        for n in range(len(next(iter(steps.values())))) for planner, values in steps.items() for step in [values[n]]])


def test_gains_by_hand():
    steps = {"even": [2.0, 4.0], "alpa": [1.5, 1.0], "pipeedge": [1.2, 3.0], "nnpiper": [1.0, 2.0]}
    gains = statistics.gains(table(steps, feasible={"alpa": [True, False], "nnpiper": [True, True]}))
    assert list(gains) == ["even", "alpa", "pipeedge", BEST_PROGRAM]
    assert gains["even"].tolist() == pytest.approx([100.0, 100.0])
    # alpa's plan of the second problem does not fit: no gain there, and it is no best program either
    assert gains["alpa"].tolist() == pytest.approx([50.0, np.nan], nan_ok=True)
    assert gains[BEST_PROGRAM].tolist() == pytest.approx([20.0, 50.0])
    summary = statistics.summarise(gains, ["transfers", "environment"]).set_index("planner")
    assert summary.loc["alpa", ["problems", "no_plan", "mean"]].tolist() == [2, 1, 50.0]
    assert summary.loc[BEST_PROGRAM, "mean"] == pytest.approx(35.0)
    assert summary.loc[BEST_PROGRAM, "geometric_mean"] == pytest.approx(100 * (np.sqrt(1.2 * 1.5) - 1))


def test_a_problem_that_nnpiper_does_not_fit_has_no_gain():
    steps = {"even": [2.0, 4.0], "nnpiper": [1.0, 0.1]}
    gains = statistics.gains(table(steps, feasible={"nnpiper": [True, False]}))
    assert gains["even"].tolist() == pytest.approx([100.0, np.nan], nan_ok=True)


def test_problems_and_planners_stay_in_their_order():
    rows = table({"piper": [1.0, 1.0], "even": [1.0, 1.0], "nnpiper": [1.0, 1.0]})
    rows = rows.iloc[::-1]
    assert list(statistics.usable_steps(rows)) == ["nnpiper", "even", "piper"]
    assert statistics.usable_steps(rows).index.get_level_values("number").tolist() == [1, 0]


def test_gaps_leave_out_problems_without_a_reference():
    rows = table({"annealing": [1.0, 1.0], "nnpiper": [1.1, 9.0]}, feasible={"annealing": [True, False]})
    gaps = statistics.gap_table(rows, statistics.CASE, reference="annealing")
    assert gaps["nnpiper"].tolist() == pytest.approx([10.0])


def test_intervals_of_known_distributions():
    assert statistics.mean_interval([np.full(20, 3.0)]) == (3.0, 3.0, 3.0)
    assert all(np.isnan(statistics.mean_interval([np.array([np.nan])])))
    rng = np.random.default_rng(0)
    values = rng.standard_normal(400)
    mean, low, high = statistics.mean_interval([values])
    assert mean == values.mean()
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.05)
    assert statistics.mean_interval([values]) == (mean, low, high)


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(300):
        _, low, high = statistics.mean_interval([rng.exponential(1.0, 60)])
        inside += low <= 1.0 <= high
    assert 0.88 < inside / 300 < 0.98  # 95 %; the percentile bootstrap is a little short on skewed data


def test_groups_have_equal_weight_and_are_resampled_within():
    mean, low, high = statistics.mean_interval([np.zeros(1000), np.full(10, 4.0), np.array([np.nan])])
    assert (mean, low, high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("numbers, text", [
    ((17.975, 16, 20.04), "18.0 [16.0, 20.0]"), ((0.5, -0.1, 1.254), "0.50 [-0.10, 1.25]"),
    ((312.2, 250.6, 400.0), "312 [251, 400]"), ((np.nan,) * 3, "-")])
def test_text_of_an_interval(numbers, text):
    assert statistics.text_interval(*numbers) == text


# insight

def test_hidden_inputs_are_hidden_and_judged_on_the_true_problem(net):
    rows = {row["hidden"]: row for row in experiments.hidden(CASE, net)}
    assert set(rows) == {"nothing", "computation costs", "communication costs", "micro-batches"}
    problem = CASE.problem()
    told = experiments.piper(net).solve(problem.replace(micro_batches=1), polish=False)
    assert rows["micro-batches"]["plan"] == told.text(problem.layers)
    assert rows["micro-batches"]["step_s"] == simulator.step_time(problem, told)


def test_probabilities_of_the_pointer(net):
    problem = Case("gpt2", "completely_heterogeneous", 5, 5, 0).problem()
    first, following = insight.first_and_next(experiments.piper(net).network, problem)
    assert first.sum() == pytest.approx(1.0, abs=1e-6)
    assert np.isnan(np.diag(following)).all()
    assert np.nansum(following, axis=1) == pytest.approx(np.ones(5), abs=1e-6)


def test_habits_by_hand(net):
    row = insight.habits(Case("gpt2", "completely_heterogeneous", 4, 4, 0), net)[0]
    problem = Case("gpt2", "completely_heterogeneous", 4, 4, 0).problem()
    plan = experiments.piper(net).solve(problem, polish=False, samples=1)
    order = [group[0] for group in plan.groups]
    times = insight.transfer_times(problem)
    used = np.prod([times[a, b] for a, b in zip(order, order[1:])]) ** (1 / 3)
    every = np.prod([times[a, b] for a in range(4) for b in range(4) if a != b]) ** (1 / 12)
    assert row["link_ratio"] == pytest.approx(used / every)


def test_rank_correlation():
    a = np.array([1.0, 2.0, 3.0, 4.0])
    assert insight.rank_correlation(a, np.exp(a)) == pytest.approx(1.0)
    assert insight.rank_correlation(a, -a) == pytest.approx(-1.0)
    assert insight.rank_correlation(a, np.ones(4)) == 0.0
    # by hand: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4
    assert insight.rank_correlation(a, np.array([1.0, 2.0, 2.0, 3.0])) == pytest.approx(4.5 / np.sqrt(4.5 * 5))


def test_training_reads_no_data_and_the_audit_would_see_it(monkeypatch):
    assert insight.files_read_by_training() == []
    spying = insight._AUDITED.replace("print(json", "import nnpiper.cluster\nprint(json")
    monkeypatch.setattr(insight, "_AUDITED", spying.replace("vcta.train(", "(lambda *a, **b: None)("))
    assert insight.files_read_by_training() == ["data/hardware.json", "data/models.json"]


# claims on record

def test_every_testable_claim_has_its_number_in_the_notebook():
    listed = claims.read_claims(DATA / "claims.json")
    source = json.dumps(json.loads((DATA.parent / "notebooks" / "09_claims.ipynb").read_text()))
    for claim in listed:
        assert claim.testable == (f'\\"{claim.id}\\"' in source)
    assert {claim.source for claim in listed} >= {"preprint", "IJCNN", "abstracts"}


# charts

def test_an_ecdf_counts_problems_without_a_plan():
    figure, axes = plt.subplots()
    plots.draw_ecdf(axes, {"even": np.array([2.0, np.nan, 1.0, 4.0]), "metis": np.array([np.nan])})
    even, metis = axes.lines[:2]
    assert even.get_xdata().tolist() == [1.0, 1.0, 2.0, 4.0]
    assert even.get_ydata().tolist() == [0.0, 0.25, 0.5, 0.75]
    assert len(metis.get_xdata()) == 0
    plt.close(figure)


def test_every_planner_has_a_look_of_its_own():
    names = [*COMPARED, BEST_PROGRAM, "nnpiper", "network", "annealing"]
    looks = {(*plots.LINES[name], name in plots.OPEN) for name in names}
    assert len(looks) == len(names)


def test_gap_axes_show_all_values_and_only_ticks_within():
    figure, axes = plt.subplots()
    means, lows, highs = np.array([[-3.0, 40.0], [-5.0, 20.0], [0.0, 80.0]])
    plots.draw_gaps(axes, [(plots.points("nnpiper"), means, lows, highs)], ["a", "b"])
    low, high = axes.get_xlim()
    assert low < -5 and high > 80
    assert [text.get_text() for text in axes.get_xticklabels()] == ["-3", "-1", "0", "1", "3", "10", "30", "100"]
    plt.close(figure)
