"""Proven optima: how far every planner is from the best there is, and what optimising a formula costs.

The problems are trials (testset.py) of sets of their own, "proofs" and "links", on which nothing was chosen. The least
exact step is proven by branch and bound (`baselines/exact.py`) within a cap in steps of work, so that what is proven
does not depend on the machine's speed. A gap is the step over the proven optimum, minus 1, in %: a true optimality gap.

Symbols: K devices, S stages, M micro-batches; R(s) the time of one micro-batch from stage s to the last and back.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from . import closed_form, cost, simulator, subset_program, testset
from .baselines import PLANNERS, PlannerLimit, anneal, exact
from .baselines.branching import minimise
from .bound import lower_bound
from .closed_form import FORMS
from .cost import BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD
from .experiments import SORTED, judge, piper, solve_sorted
from .problem import TRANSFERS, Problem, Strategy
from .solver import MOVES
from .statistics import mean_interval
from .testset import TRIAL, Trial

EVERY_DEVICE = ((4, 4), (6, 6), (8, 8), (10, 10))  # (K, S)
GROUPS = ((5, 3), (8, 4))
LARGEST = ((12, 12), (10, 5))  # as far as proofs reach
PROOF_STEPS = 3e7  # of the program and of the search: some 10 s at most
OPTIMUM = "optimum"
AS_MANY = "annealing, as many moves"
FORM_DEVICES = 8  # up to which the best plans by the formulas are looked for: one device a stage
SOLVED = 1e-6  # %: a gap that small is the rounding of a sum


def proof_trials(smoke: bool = False) -> list[Trial]:
    """The problems of the proofs: 40 of each size, 20 of the largest; in small a few of the smallest."""
    if smoke:
        return testset.trials("proofs", ((4, 4), (5, 3)), 1)[::7]
    return testset.trials("proofs", EVERY_DEVICE + GROUPS, 2) + testset.trials("proofs", LARGEST, 1)


def link_trials(count: int, K: int = 6) -> list[Trial]:
    """`count` problems with K devices, one a stage, completely heterogeneous, 1F1B."""
    return [Trial("links", K, K, "completely_heterogeneous", "1f1b", "blocking", number) for number in range(count)]


def solvers(checkpoint: Path) -> dict[str, Callable]:
    """solve(problem) of every planner by its name in the tables; NNPiper in the fixed setting (no budget, seed 0), and
    annealing with its own number of moves and with NNPiper's."""
    network = piper(checkpoint)
    classical = {name: solve for name, solve in PLANNERS.items() if name not in ("exact", "anneal")}
    return classical | {SORTED: solve_sorted, "annealing": anneal.solve, AS_MANY: partial(anneal.solve, runs=1,
                                                                                          moves=MOVES),
                        "network": partial(network.solve, polish=False), "nnpiper": network.solve}


def optimum(problem: Problem) -> Strategy:
    """The strategy with the least exact step of a problem that has a feasible one. Raises PlannerLimit where that is
    not proven within PROOF_STEPS or the program is out of reach."""
    program = subset_program.build(problem, exact.MOST_KEYS, exact.MOST_PAIRS)
    if program is None:
        raise PlannerLimit(f"proof: {problem.devices} devices in {problem.stages} stages are out of reach")
    start = anneal.solve(problem)
    upper_s = simulator.step_time(problem, start) if cost.overflow_bytes(problem, start) == 0.0 else None
    better, _, proven = minimise(problem, program, upper_s, False, PROOF_STEPS)
    if not proven:
        raise PlannerLimit(f"proof: not done within {PROOF_STEPS:.3g} steps")
    return start if better is None else better


def prove_and_plan(trial: Trial, checkpoint: Path) -> list[dict]:
    """Rows of one trial: the proven optimum, then every planner and, where each of up to FORM_DEVICES devices has a
    stage, the best plan by each formula (`promised_s`: what the formula says of it). Only the first row, with no step,
    where the optimum is not proven. A planner beyond its cap has no step either.

    The first row also has the certified bound (bound_s, found as for a solved problem: from the step of NNPiper's
    plan), the shortest step that annealing finds without memory limits (unlimited_s) and wall times (prove_s,
    bound_wall_s).
    """
    problem = trial.problem()
    fields = {name: getattr(trial, name) for name in TRIAL} | {"layers": problem.layers, "micro_batches":
                                                               problem.micro_batches}
    begin = time.perf_counter()
    best = _plan(optimum, problem)
    first = fields | {"planner": OPTIMUM, "prove_s": time.perf_counter() - begin} | best
    if not best["feasible"]:
        return [first]
    rows = [first] + [fields | {"planner": name} | _plan(solve, problem) for name, solve in solvers(checkpoint).items()]
    own = rows[-1]
    begin = time.perf_counter()
    first["bound_s"] = lower_bound(problem, own["step_s"] if own["feasible"] else None)
    first["bound_wall_s"] = time.perf_counter() - begin
    free = problem.without_memory_limit()
    first["unlimited_s"] = simulator.step_time(free, anneal.solve(free))
    if problem.stages == problem.devices <= FORM_DEVICES:
        rows += [fields | {"planner": form} | _by_form(problem, form) for form in FORMS]
    return rows


def with_gaps(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of proven problems with `gap` in % to the proven optimum, NaN where there is no plan that fits. Raises
    AssertionError where a plan is shorter than the optimum: a proof or a plan would be wrong."""
    best = rows[rows["planner"] == OPTIMUM].set_index(TRIAL)
    steps = best["step_s"].where(best["feasible"])
    optimum = steps.reindex(pd.MultiIndex.from_frame(rows[TRIAL])).to_numpy()
    rows = rows.assign(gap=percent(rows["step_s"].where(rows["feasible"]) / optimum))[~np.isnan(optimum)]
    assert not (rows["gap"] < -SOLVED).any(), rows[rows["gap"] < -SOLVED].to_string()
    return rows


def gap_table(rows: pd.DataFrame, by: tuple[str, ...] = ()) -> pd.DataFrame:
    """A row for every group of `by` and every planner of a `with_gaps` table. Gaps are over plans that fit in memory;
    `optimal` is the share of all problems, those without a plan included."""
    records = []
    for key, part in rows[~rows["planner"].isin((OPTIMUM, *FORMS))].groupby([*by, "planner"], sort=False):
        gaps = part["gap"].dropna()
        mean, low, high = mean_interval([gaps.to_numpy()])
        records.append(dict(zip([*by, "planner"], key)) | {
            "problems": len(part), "beyond its limit": int(part["step_s"].isna().sum()),
            "over memory": int((part["step_s"].notna() & ~part["feasible"]).sum()), "mean gap [%]": mean, "low": low,
            "high": high, "median [%]": gaps.median(), "worst [%]": gaps.max(),
            "optimal [%]": 100.0 * (gaps <= SOLVED).sum() / len(part)})
    return pd.DataFrame(records)


def proof_table(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a size: problems, proofs, in how many memory binds for certain (a shorter strategy is known that does not
    fit), and how far the certified bound is below the optimum in %."""
    records = []
    for (K, S), part in rows[rows["planner"] == OPTIMUM].groupby(["devices", "stages"], sort=False):
        proven = part[part["feasible"]]
        below = -percent(proven["bound_s"] / proven["step_s"])
        records.append({
            "devices": K, "stages": S, "problems": len(part), "proven": len(proven),
            "memory binds": int((proven["unlimited_s"] < proven["step_s"] * (1.0 - 1e-9)).sum()),
            "bound below optimum, mean [%]": below.mean(), "worst [%]": below.max(),
            "bound is the optimum [%]": 100.0 * (below <= SOLVED).mean()})
    return pd.DataFrame(records)


def proof_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Wall times of the proofs and of the certified bounds by size."""
    best = rows[rows["planner"] == OPTIMUM].groupby(["devices", "stages"], sort=False)
    return best.agg(**{"proof, median [s]": ("prove_s", "median"), "longest [s]": ("prove_s", "max"),
                       "bound, median [s]": ("bound_wall_s", "median")}).reset_index()


def form_table(rows: pd.DataFrame) -> pd.DataFrame:
    """What the best plan by each formula loses against the optimum in %, and by how much its exact step differs from
    what the formula promised in %, by schedule and transfer mode; rows of a `with_gaps` table."""
    records = []
    rows = rows[rows["planner"].isin(FORMS)]
    for (form, schedule, transfers), part in rows.groupby(["planner", "schedule", "transfers"], sort=False):
        mean, low, high = mean_interval([part["gap"].to_numpy()])
        records.append({"T": form, "schedule": schedule, "transfers": transfers, "problems": len(part),
                        "loss [%]": mean, "low": low, "high": high, "worst [%]": part["gap"].max(),
                        "optimal [%]": 100.0 * (part["gap"] <= SOLVED).mean(),
                        "exact over promised [%]": percent(part["step_s"] / part["promised_s"]).mean()})
    return pd.DataFrame(records)


def at_ratio(problem: Problem, ratio: float) -> Problem:
    """The problem with all links slowed down or sped up alike, so that the mean transfer one way, over pairs of devices
    and layer boundaries, takes `ratio` of a balanced stage (the time of a stage if the work were shared by speed)."""
    pairs = ~np.eye(problem.devices, dtype=bool)
    transfer_s = (problem.latency_s[pairs][:, None]
                  + problem.output_bytes[None, :-1] / problem.bandwidth_bytes_per_s[pairs][:, None]).mean()
    balanced_s = 1.0 / (1.0 / (problem.forward_s + problem.backward_s).sum(axis=0)).sum()
    factor = ratio * balanced_s / transfer_s
    return problem.replace(bandwidth_bytes_per_s=np.minimum(problem.bandwidth_bytes_per_s / max(factor, 1e-9), 1e29),
                           latency_s=problem.latency_s * factor)


def mislead(task: tuple[Trial, float], checkpoint: Path) -> list[dict]:
    """Rows of one (trial, ratio) in each transfer mode: % that the best plan by each formula, and NNPiper's, loses
    against the proven optimum (`loss`), and % by which the exact step of a formula's plan is over what was promised."""
    trial, ratio = task
    problem = at_ratio(trial.problem(), ratio)
    rows = []
    for transfers in TRANSFERS:
        asked = problem.replace(transfers=transfers)
        best_s = simulator.step_time(asked, optimum(asked))
        plans = {form: _by_form(asked, form) for form in FORMS} | {"nnpiper": _plan(piper(checkpoint).solve, asked)}
        rows += [{"ratio": ratio, "transfers": transfers, "number": trial.number, "planner": name,
                  "loss": percent(plan["step_s"] / best_s), "over promised":
                  percent(plan["step_s"] / plan["promised_s"]) if name in FORMS else np.nan}
                 for name, plan in plans.items()]
    return rows


def limits(stages: cost.StageArrays, M: int) -> dict[str, float]:
    """Two times in s that no 1F1B step with overlapped transfers falls under: of a stage that is always busy, head(s) +
    M (F(s) + B(s)), and of S - s micro-batches in flight, head(s) + ceil(M / (S - s)) R(s); head(s) is the first
    micro-batch's way to stage s and the last one's way back."""
    a = stages.matrix()
    S = a.shape[1]
    work = a[FORWARD] + a[BACKWARD]
    once = work + a[SEND_FORWARD] + a[SEND_BACKWARD]
    around = once[::-1].cumsum()[::-1]  # R(s)
    head = once.sum() - around
    trips = np.array([math.ceil(M / (S - s)) for s in range(S)])
    return {"busiest stage": float((head + M * work).max()), "round trips": float((head + trips * around).max())}


def percent(ratio):
    """% over 1, rounded, so that equal steps give 0 and not the last bit of a sum."""
    return np.round(100.0 * (ratio - 1.0), 9) + 0.0


def _plan(solve, problem):
    """What `judge` says of a planner's plan; no step where the problem is beyond its cap."""
    try:
        return judge(problem, solve(problem))
    except PlannerLimit:
        return {"step_s": np.nan, "feasible": False, "plan": ""}


def _by_form(problem, form):
    plan = closed_form.solve(problem, form)
    promised_s = closed_form.formula(form, cost.stage_arrays(problem, plan), problem.micro_batches)
    return judge(problem, plan) | {"promised_s": promised_s}
