"""Ablations: trainings that differ from a base in one thing, each with several seeds and the same training time.

The time is CPU time of one thread. How many steps it buys is measured for each ablation on the same draws, in rounds
over all of them of which the fastest counts, as a machine's pace changes from minute to minute; all seeds of an
ablation make equally many steps. The networks then plan problems of the
development set, alone and with polish; the gap is to the best plan known, long annealing included.

Symbols: K devices, S stages.
"""

import dataclasses
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from . import baselines, vcta
from .checkpoint import card_path
from .experiments import each, judge, piper
from .network import Network, Size
from .paths import CHECKPOINT
from .problem import InputError, write_text
from .report import csv_text, progress
from .testset import TRIAL, Trial, trials

# Loss and contrast of the recipe before these studies. What each changes in it, by what it asks
BASE = {"loss": "pairwise", "groupings": 8, "grows": False}
CHANGES = {
    "recipe": {name: getattr(vcta.Recipe(), name) for name in BASE},
    "base": {},
    "best against spread": {"loss": "best-against-spread"},
    "self-labelling": {"loss": "self-labelling"},
    "policy gradient": {"loss": "policy-gradient"},
    "imitation of annealed plans": {"loss": "imitation", "polish": 10_000},
    "contrast 4 x 2": {"groupings": 4, "divisions": 2},
    "contrast 16 x 8": {"groupings": 16, "divisions": 8},
    "contrast 32 x 8": {"groupings": 32, "divisions": 8},
    "contrast grows": {"grows": True},
    "with polished pairs": {"polish": 1_000},
    "half as wide": {"size": Size(width=32, stage_width=16)},
    "twice as wide": {"size": Size(width=128, stage_width=64)},
    "one layer": {"size": Size(depth=1, stage_depth=1)},
    "four layers": {"size": Size(depth=4, stage_depth=4)},
    **{f"blind to {name}": {"blind": name} for name in ("links", "memory", "micro-batches", "stages")}}
SIZES = (8, 8), (12, 12), (16, 16), (8, 4), (12, 6), (16, 8)  # (K, S)
TIMED_STEPS, TIMED_ROUNDS = 25, 4
REFERENCE = dict(runs=8, moves=100_000)


@dataclass(frozen=True)
class Training:
    """One training of an ablation: a name in CHANGES, seed, number of steps, and what it makes."""

    name: str
    seed: int
    steps: int
    checkpoint: Path


def step_cpu_s(name: str, timed: int = TIMED_STEPS) -> float:
    """CPU time in s of a training step of an ablation, mean of so many that are spread over a training."""
    recipe = _recipe(name, steps=timed)
    network = Network(recipe.size, recipe.blind)
    vcta.contrast_step(network, recipe, 0).backward()  # compiles
    begin = time.process_time()
    for step in range(timed):
        vcta.contrast_step(network, recipe, step).backward()
    return (time.process_time() - begin) / timed


def _recipe(name, **others):
    return vcta.Recipe(**{**BASE, **CHANGES[name]}, **others)


def train(training: Training) -> Training:
    """Train in the checkpoint's folder, or go on there."""
    recipe = _recipe(training.name, steps=training.steps, seed=training.seed, log_rows=0)
    vcta.train(training.checkpoint.parent, recipe, progress=False)
    return training


def reference(trial: Trial) -> float:
    """Step in s of a long annealing."""
    problem = trial.problem()
    return judge(problem, baselines.anneal.solve(problem, seed=trial.number, **REFERENCE))["step_s"]


def judged(training: Training, wanted: list[Trial]) -> pd.DataFrame:
    """Rows of a training: each trial's step in s by the network alone and with polish in the fixed setting; NaN where
    the plan does not fit."""
    rows = []
    for trial in wanted:
        problem = trial.problem()
        row = {"ablation": training.name, "seed": training.seed, "steps": training.steps, **dataclasses.asdict(trial)}
        for part, polish in (("network_s", False), ("polished_s", True)):
            plan = judge(problem, piper(training.checkpoint).solve(problem, polish=polish))
            row[part] = plan["step_s"] if plan["feasible"] else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def beside(rows: pd.DataFrame, checkpoints: dict[str, list[Path]]) -> pd.DataFrame:
    """`summary` of other networks on the problems of `rows` (of ablations.csv): for each name the checkpoints of its
    seeds; the gap is to the best step of all."""
    wanted = [Trial(*key) for key in rows[["set", *TRIAL]].drop_duplicates().itertuples(index=False)]
    others = [Training(name, seed, _steps(json.loads(card_path(path).read_text(encoding="utf-8"))), path)
              for name, paths in checkpoints.items() for seed, path in enumerate(paths)]
    own = pd.concat(list(each(partial(judged, wanted=wanted), others, least=1)), ignore_index=True)
    table = summary(own, known=pd.concat([rows, own]))  # apart: a name may be an ablation's, too
    return table.set_index("ablation").loc[list(checkpoints)].reset_index(names="training")


def _steps(card):
    """Of a training and of those that it went on from."""
    return card["recipe"]["steps"] + (_steps(card["start"]) if "start" in card else 0)


def study(out: Path, seconds: float, seeds: int, names: tuple[str, ...] = tuple(CHANGES),
          sizes: tuple[tuple[int, int], ...] = SIZES) -> pd.DataFrame:
    """Train each ablation `seeds` times for so many seconds of CPU time and judge all networks on the development set.
    Trainings that are finished in the folder `out` are not made again. Writes out/steps.csv and, of these names,
    out/ablations.csv: the rows of `judged` with the reference's step in s as reference_s. Raises InputError where the
    folder is of trainings of another length."""
    out.mkdir(parents=True, exist_ok=True)
    steps = _steps_of(out / "steps.csv", seconds, names)
    trainings = [Training(name, seed, int(steps[name]), out / f"{name.replace(' ', '-')}-{seed}" / CHECKPOINT.name)
                 for seed in range(seeds) for name in names]
    list(progress(each(train, trainings, least=1), "trainings", len(trainings)))
    wanted = trials("development", sizes)
    best = list(progress(each(reference, wanted), "references", len(wanted)))
    tables = progress(each(partial(judged, wanted=wanted), trainings, least=1), "networks", len(trainings))
    rows = pd.concat(tables, ignore_index=True)
    rows["reference_s"] = np.tile(best, len(trainings))
    write_text(out / "ablations.csv", csv_text(rows))
    return rows


def _steps_of(path, seconds, names):
    """Steps of each name as the file says; those that it lacks are measured and added."""
    columns = ["ablation", "steps", "cpu_seconds"]
    known = pd.read_csv(path) if path.exists() else pd.DataFrame(columns=columns)
    for other in known["cpu_seconds"]:
        if other != seconds:
            raise InputError(f"{path}: cpu_seconds: {other:g}; allowed: {seconds:g}, as asked for, or another folder")
    names = [name for name in names if name not in set(known["ablation"])]
    if names:
        cpu_s = np.array(list(each(step_cpu_s, TIMED_ROUNDS * names))).reshape(TIMED_ROUNDS, len(names)).min(axis=0)
        new = [(name, max(int(seconds / step_s), 2), seconds) for name, step_s in zip(names, cpu_s)]
        known = pd.DataFrame([*known[columns].itertuples(index=False, name=None), *new], columns=columns)
        write_text(path, csv_text(known))
    return known.set_index("ablation")["steps"]


def summary(rows: pd.DataFrame, known: pd.DataFrame | None = None) -> pd.DataFrame:
    """A row an ablation, those of CHANGES in their order: seeds and steps of its trainings, and of the
    network alone and with polish, S = K and S < K apart, the gap in % (mean over the problems, then over the seeds, as
    "mean [%]", with the seeds' standard deviation) and how many plans do not fit, a seed. The gap is to the best step
    in `known`, by default in `rows`."""
    known = rows if known is None else known
    best = known.groupby(TRIAL)[["network_s", "polished_s", "reference_s"]].min().min(axis=1).rename("best_s")
    rows = rows.join(best, on=TRIAL)
    rows["kind"] = np.where(rows["devices"] == rows["stages"], "S = K", "S < K")
    records = []
    present = dict.fromkeys(rows["ablation"])
    for name in sorted(present, key=lambda name: list(CHANGES).index(name) if name in CHANGES else len(CHANGES)):
        own = rows[rows["ablation"] == name]
        record = {"ablation": name, "seeds": own["seed"].nunique(), "steps": int(own["steps"].iloc[0])}
        for part in ("network", "polished"):
            for kind in ("S = K", "S < K"):
                chosen = own[own["kind"] == kind]
                gap = 100 * (chosen[f"{part}_s"] / chosen["best_s"] - 1)
                seeds = gap.groupby(chosen["seed"]).mean()
                record |= {f"{part}, {kind} [%]": seeds.mean(), f"{part}, {kind} sd": seeds.std(),
                           f"{part}, {kind} no plan": gap.isna().sum() / record["seeds"]}
        records.append(record)
    return pd.DataFrame(records)
