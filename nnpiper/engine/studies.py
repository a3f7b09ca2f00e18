"""The measurements on the emulated cluster, as rows, and their files in data/engine.

A row is one job: what it is, the steps it took, and the two constants that were measured just before (latency of a
small message, overhead of an operation). Predictions are made from rows (`tables`), so they need no emulated cluster.
"""

import json
import platform
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from .. import simulator
from ..paths import DATA
from ..problem import write_text
from ..provenance import environment
from ..report import progress
from . import draws, links
from .emulator import Emulator, Job

SHIPPED = DATA / "engine"
STUDIES = ("fidelity", "order", "speedups", "timelines")
CONDITIONS = "emulated_cluster.json"  # where and when
RANKS = 6
STEPS = 5


def measure_all(checkpoint: Path, smoke: bool = False) -> tuple[dict[str, pd.DataFrame], dict]:
    """Every study in a fresh emulated cluster, and where and when. smoke: two strategies, one problem. Raises
    InputError where tools or rights are missing, EmulatorError."""
    started = datetime.now(UTC)
    with Emulator(RANKS) as emulator:
        constants = {"latency_s": emulator.latency_s(), "overhead_s": emulator.overhead_s()}
        strategies = draws.strategies(2 if smoke else draws.DRAWS)
        fidelity, timelines = measure_fidelity(emulator, strategies, constants)
        found = {"fidelity": fidelity, "order": measure_order(emulator, strategies[::2][:1 if smoke else 6], constants),
                 "speedups": measure_speedups(emulator, checkpoint, constants, smoke), "timelines": timelines}
        machine = environment()
        facts = {"date": started.isoformat(timespec="seconds"), "kernel": platform.release(),
                 "machine": platform.machine(), "processor": machine["processor"], "cores": machine["usable_cores"],
                 "torch": emulator.torch_version, "python": machine["python"],
                 "namespaces": "root" if emulator.access.as_root else "user",
                 "priority": "real-time" if emulator.access.real_time else "ordinary", **constants}
    return found, facts


def measure_or_load(checkpoint: Path, smoke: bool = False) -> tuple[dict[str, pd.DataFrame], dict, str]:
    """As `measure_all`; where tools or rights are missing the shipped measurements and one line that says what is."""
    lacking = links.access().lacking
    return (*load(), lacking) if lacking else (*measure_all(checkpoint, smoke), "")


def measure_fidelity(emulator: Emulator, strategies: list[draws.Draw],
                     constants: dict) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of the random strategies; and the operations of one strategy of each schedule, the first with four stages,
    pairs of equal links and transfers of about half a stage (the first of all, if there are only a few)."""
    rows, pictured, operations = [], {}, []
    for draw in strategies:
        if len(strategies) < draws.DRAWS or (draw.links == "pair" and draw.job.stages == 4 and 0.4 < draw.ratio < 0.6):
            pictured.setdefault(draw.job.schedule, draw.number)
    for draw in progress(strategies, "random strategies"):
        run = emulator.run(draw.job, STEPS)
        rows.append({"number": draw.number, "links": draw.links, "ratio": draw.ratio} | constants
                    | _measured(draw.job, run.steps_s))
        if draw.number in pictured.values():
            operations += [{"number": draw.number, "kind": kind, "stage": s, "micro_batch": m, "begin_s": begin,
                            "end_s": end} for (kind, s, m), (begin, end) in run.operations_s.items()]
    return pd.DataFrame(rows), pd.DataFrame(operations)


def measure_order(emulator: Emulator, strategies: list[draws.Draw], constants: dict) -> pd.DataFrame:
    """Rows of 1F1B strategies with receives posted first, and as torch lists them."""
    return pd.DataFrame([
        {"number": draw.number, "links": draw.links, "ratio": draw.ratio, "receives_first": first} | constants
        | _measured(draw.job, emulator.run(draw.job, 3, first).steps_s)
        for draw in progress(strategies, "order of posting") for first in (True, False)])


def measure_speedups(emulator: Emulator, checkpoint: Path, constants: dict, smoke: bool = False) -> pd.DataFrame:
    """Rows of every planner on every problem; equal plans run once. Time is scaled so that NNPiper's step takes 20 ms
    for every micro-batch on its way; short steps run three times, those over 0.75 s once."""
    rows = []
    for case in progress(draws.cases(smoke), "problems"):
        problem = case.problem()
        plans = draws.plans(problem, checkpoint)
        time_scale = 0.02 * (problem.micro_batches + problem.stages) / simulator.step_time(problem, plans["nnpiper"])
        scaled = draws.emulated_problem(problem, time_scale, constants["latency_s"])
        ran = {}
        for planner, plan in plans.items():
            job = draws.strategy_job(scaled, plan, constants["latency_s"])
            if job not in ran.values():
                steps_s = emulator.run(job, int(np.clip(1.5 / simulator.step_time(scaled, plan), 1, 3))).steps_s
            else:
                twin = next(name for name, other in ran.items() if other == job)
                steps_s = next(row for row in rows[::-1] if row["planner"] == twin)["steps_s"]
            ran[planner] = job
            rows.append(case.fields | {"planner": planner, "plan": plan.text(problem.layers)} | constants
                        | _measured(job, steps_s))
    return pd.DataFrame(rows)


def save(found: dict[str, pd.DataFrame], facts: dict, folder: Path) -> None:
    """Write STUDY.csv for every study, and CONDITIONS."""
    for study, rows in found.items():
        shown = rows.assign(job=[job.to_json() for job in rows["job"]],
                            steps_s=[" ".join(f"{step:.6f}" for step in steps) for steps in rows["steps_s"]]
                            ) if "job" in rows else rows
        write_text(folder / f"{study}.csv", shown.to_csv(index=False, float_format="%.6f", lineterminator="\n"))
    write_text(folder / CONDITIONS, json.dumps(facts, indent=1) + "\n")


def load(folder: Path = SHIPPED) -> tuple[dict[str, pd.DataFrame], dict]:
    """What `save` wrote; the shipped measurements unless told otherwise."""
    found = {study: pd.read_csv(folder / f"{study}.csv") for study in STUDIES}
    for rows in found.values():
        if "job" in rows:
            rows["job"] = [Job.from_json(text) for text in rows["job"]]
            rows["steps_s"] = [[float(step) for step in text.split()] for text in rows["steps_s"]]
    return found, json.loads((folder / CONDITIONS).read_text(encoding="utf-8"))


def _measured(job, steps_s):
    return {"job": job, "steps_s": steps_s, "step_s": float(np.median(steps_s))}
