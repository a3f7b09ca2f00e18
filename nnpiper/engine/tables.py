"""Tables from measured rows (`studies`): measured beside predicted, and whether what was aimed at holds.

Errors are prediction / measured - 1, in %: negative where the prediction is too short.
"""

import numpy as np
import pandas as pd

from .. import experiments, simulator
from ..problem import TRANSFERS, Problem, Strategy
from ..simulator import Timeline
from . import rendezvous
from .emulator import Job

RENDEZVOUS = "rendezvous"
FORMS = ("compute alone", "compute + next boundary", "compute + own sends")
BARE = (f"{TRANSFERS[0]}, no overhead", f"{RENDEZVOUS}, no overhead")
PREDICTORS = (*TRANSFERS, RENDEZVOUS, *BARE, *FORMS)
PROBLEM = ["model", "environment", "devices", "stages", "number"]
NOT_RUN, TOO_FEW = "not run here", "smoke: too few for a verdict"


def predictions(row: pd.Series) -> dict[str, float]:
    """Step in s of a row's job by every predictor; transfers take the measured latency and bytes / bandwidth,
    operations the measured overhead beside their sleep, but for the two of BARE. Nothing else is measured or fitted."""
    job = row["job"]
    stages = job.stage_arrays(row["latency_s"], row["overhead_s"])
    bare = job.stage_arrays(row["latency_s"])
    found = {mode: simulator.simulate(stages, job.schedule, job.micro_batches, mode) for mode in TRANSFERS}
    found[RENDEZVOUS] = rendezvous.step_time(stages, job.schedule, job.micro_batches)
    found[BARE[0]] = simulator.simulate(bare, job.schedule, job.micro_batches, TRANSFERS[0])
    found[BARE[1]] = rendezvous.step_time(bare, job.schedule, job.micro_batches)
    return found | experiments.closed_forms(stages, job.micro_batches)


def fidelity(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a strategy: measured step, spread (largest - smallest) and the error of every predictor."""
    lines = []
    for _, row in rows.iterrows():
        job, predicted = row["job"], predictions(row)
        lines.append({"number": row["number"], "schedule": job.schedule, "links": row["links"], "S": job.stages,
                      "M": job.micro_batches, "transfer / compute": row["ratio"], "measured [s]": row["step_s"],
                      "spread [%]": 100 * np.ptp(row["steps_s"]) / row["step_s"],
                      **{f"{name} [%]": 100 * (predicted[name] / row["step_s"] - 1) for name in PREDICTORS}})
    return pd.DataFrame(lines)


def fidelity_summary(table: pd.DataFrame) -> pd.DataFrame:
    """Mean, mean size and largest size of the errors, for each schedule and kind of links, and over all."""
    parts = [((schedule, links), part) for (schedule, links), part in table.groupby(["schedule", "links"], sort=False)]
    lines = []
    for (schedule, links), part in [*parts, (("all", "all"), table)]:
        for name in PREDICTORS:
            error = part[f"{name} [%]"]
            lines.append({"schedule": schedule, "links": links, "strategies": len(part), "predictor": name,
                          "mean error [%]": error.mean(), "mean |error| [%]": error.abs().mean(),
                          "worst |error| [%]": error.abs().max()})
    return pd.DataFrame(lines)


def timelines(rows: pd.DataFrame, operations: pd.DataFrame) -> dict[int, tuple[Timeline, Timeline]]:
    """{number: (measured, predicted by the default mode)} of the strategies whose operations were kept; the measured
    one knows no transfers."""
    found = {}
    for number, part in operations.groupby("number", sort=False):
        row = rows[rows["number"] == number].iloc[0]
        job = row["job"]
        start, end = np.zeros((2, 2, job.stages, job.micro_batches))
        where = part["kind"].map("FB".index), part["stage"], part["micro_batch"]
        start[where], end[where] = part["begin_s"], part["end_s"]
        nothing = np.zeros((2, job.stages))
        found[number] = (Timeline(start, end, end, nothing, nothing[0], row["steps_s"][-1]),
                         simulator.timeline(*as_problem(job, row["latency_s"], row["overhead_s"])))
    return found


def as_problem(job: Job, latency_s: float, overhead_s: float) -> tuple[Problem, Strategy]:
    """A problem and strategy, a layer and a device a stage, with the job's stage arrays; without its all-reduces."""
    S = job.stages
    rate, s = np.ones((S, S)), np.arange(S - 1)
    rate[s, s + 1], rate[s + 1, s] = job.ahead_bytes_per_s, job.back_bytes_per_s
    forward_s, backward_s = (np.repeat(np.array(times)[:, None], S, 1) + overhead_s
                             for times in (job.forward_s, job.backward_s))
    nothing = np.zeros(S)
    return (Problem(forward_s, backward_s, [*job.output_bytes, 0], nothing, nothing, nothing, nothing, rate,
                    np.full((S, S), latency_s), S, job.micro_batches, job.schedule),
            Strategy(tuple(range(1, S)), tuple((k,) for k in range(S))))


def order(rows: pd.DataFrame) -> pd.DataFrame:
    """Steps with receives posted first and as torch lists them, and how much longer the second are."""
    lines = []
    for number, part in rows.groupby("number", sort=False):
        first, listed = (part[part["receives_first"] == flag].iloc[0] for flag in (True, False))
        job = first["job"]
        lines.append({"number": number, "links": first["links"], "S": job.stages, "M": job.micro_batches,
                      "transfer / compute": first["ratio"], "receives first [s]": first["step_s"],
                      "sends first [s]": listed["step_s"],
                      "longer [%]": 100 * (listed["step_s"] / first["step_s"] - 1)})
    return pd.DataFrame(lines)


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a problem and planner: the planner whose run it shows (the first with an equal job: those ran once), how
    many steps that took, their median and spread (largest - smallest; nothing where it was one), the predicted step by
    the default mode and by rendezvous, and NNPiper's speed-up over the planner in each (step / NNPiper's step - 1)."""
    lines = []
    for problem, part in rows.groupby(PROBLEM, sort=False):
        first = {}
        table = pd.DataFrame([dict(zip(PROBLEM, problem)) | {
            "planner": row["planner"], "plan": row["plan"],
            "run of": first.setdefault(row["job"].to_json(), row["planner"]), "steps run": len(row["steps_s"]),
            "spread [%]": 100 * np.ptp(row["steps_s"]) / row["step_s"] if len(row["steps_s"]) > 1 else np.nan,
            "measured": row["step_s"],
            **{name: value for name, value in predictions(row).items() if name in (TRANSFERS[0], RENDEZVOUS)}}
            for _, row in part.iterrows()])
        own = table[table["planner"] == "nnpiper"].iloc[0]
        for name in ("measured", TRANSFERS[0], RENDEZVOUS):
            table[f"speed-up {name} [%]"] = 100 * (table[name] / own[name] - 1)
        lines.append(table.rename(columns={name: f"{name} [s]" for name in ("measured", TRANSFERS[0], RENDEZVOUS)}))
    return pd.concat(lines, ignore_index=True)


def speedups(table: pd.DataFrame) -> pd.DataFrame:
    """NNPiper's median and mean speed-up over each planner, measured and predicted, for each environment and over all;
    ahead: on how many problems NNPiper's measured step is shorter by more than 1 %, behind: longer by more than 1 %."""
    lines = []
    names = ("measured", TRANSFERS[0], RENDEZVOUS)
    environments = [*table["environment"].unique(), "all"]
    for planner in [name for name in table["planner"].unique() if name != "nnpiper"]:
        for environment in environments:
            part = table[table["planner"] == planner]
            part = part if environment == "all" else part[part["environment"] == environment]
            found = {name: part[f"speed-up {name} [%]"] for name in names}
            lines.append({"planner": planner, "environment": environment, "problems": len(part),
                          **{f"median {name} [%]": speedup.median() for name, speedup in found.items()},
                          **{f"mean {name} [%]": speedup.mean() for name, speedup in found.items()},
                          "ahead": int((found["measured"] > 1).sum()), "behind": int((found["measured"] < -1).sum())})
    return pd.DataFrame(lines)


def problems(table: pd.DataFrame, spreads: dict[tuple, float]) -> pd.DataFrame:
    """One line a problem: fastest over slowest link (`spreads` by the fields PROBLEM), NNPiper's measured step, and its
    measured speed-up over each planner; nothing where a planner does not take the problem."""
    lines = []
    for problem, part in table.groupby(PROBLEM, sort=False):
        part = part.set_index("planner")
        lines.append(dict(zip(PROBLEM, problem)) | {
            "fastest / slowest link": spreads[problem], "nnpiper [s]": part.loc["nnpiper", "measured [s]"],
            **{f"{planner} [%]": value for planner, value in part["speed-up measured [%]"].items()
               if planner != "nnpiper"}})
    return pd.DataFrame(lines)


def spearman(x: pd.Series, y: pd.Series) -> float:
    """Rank correlation: Pearson's of the ranks, equal values sharing their mean rank."""
    return float(x.rank().corr(y.rank()))


def rank_correlations(table: pd.DataFrame) -> dict[str, float]:
    """Spearman of predicted (default mode) and measured, over the different runs (equal jobs of a problem count once):
    of all steps; of the other planners' steps over NNPiper's on the same problem, pooled (without NNPiper's own runs,
    which are 1 by definition); and of steps, the lowest within one problem (with three runs or more)."""
    different = table[table["planner"] == table["run of"]]
    others = different[different["planner"] != "nnpiper"]
    mode = TRANSFERS[0]
    within = [spearman(part[f"{mode} [s]"], part["measured [s]"])
              for _, part in different.groupby(PROBLEM, sort=False) if len(part) > 2]
    return {"all steps": spearman(different[f"{mode} [s]"], different["measured [s]"]),
            "over NNPiper's": spearman(others[f"speed-up {mode} [%]"], others["speed-up measured [%]"]),
            "lowest within a problem": min(within, default=np.nan)}


def targets(fidelity_table: pd.DataFrame, step_table: pd.DataFrame, instead: str = "") -> pd.DataFrame:
    """What was aimed at before anything was measured, and the verdicts; or, in their place, `instead`: NOT_RUN for the
    shipped numbers, TOO_FEW for a smoke run."""
    def sizes(name):
        return fidelity_table[f"{name} [%]"].abs()

    ranks = rank_correlations(step_table)
    default = TRANSFERS[0]
    lines = [("mean |error| of the default mode", sizes(default).mean(), "<=", 3.0, "%"),
             ("worst |error| of the default mode", sizes(default).max(), "<=", 8.0, "%"),
             ("mean |error| under rendezvous", sizes(RENDEZVOUS).mean(), "<=", 3.0, "%"),
             ("worst |error| under rendezvous", sizes(RENDEZVOUS).max(), "<=", 8.0, "%"),
             ("Spearman, predicted and measured steps of all runs", ranks["all steps"], ">=", 0.98, ""),
             ("Spearman, others' steps over NNPiper's on the same problem", ranks["over NNPiper's"], ">=", 0.98, "")]
    return pd.DataFrame([{
        "measure": measure, "aim": f"{sign} {aim:g} {unit}".strip(), "measured": value,
        "verdict": instead or ("holds" if (value <= aim if sign == "<=" else value >= aim) else "does not hold")}
        for measure, value, sign, aim, unit in lines])
