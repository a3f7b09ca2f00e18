"""Measured profiles, which training never saw: gaps of the shipped network, alone and with polish, to long annealing.

The profiles (V100 of PipeDream and DAPPLE, A100 of Piper, six GPUs of Sailor) are read from shared/profiles beside the
repository; nothing of them is shipped but these gaps, which `python -m nnpiper.measured_profiles` writes.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from . import baselines, importers
from .experiments import each, judge, piper
from .measured import MeasuredChain
from .paths import CHECKPOINT, DATA, PROFILES
from .problem import SCHEDULES, TRANSFERS, Problem, write_text
from .report import csv_text

SHIPPED = DATA / "measured_gaps.csv"
GRAPHS = ("pipedream/gnmt.graph.txt", "pipedream/vgg16.graph.txt", "dapple/bert-24-pbs-6.txt",
          "dapple/bert-48-pbs-2.txt", "dapple/gnmt-16-pbs-64.txt", "dapple/vgg-19-pbs-32.txt")
SEEDS = 4  # of the solver: one tells little


def chains() -> dict[str, MeasuredChain]:
    """Each measured chain by name. Raises InputError where a file is missing or not what it should be."""
    sailor = PROFILES / "sailor"
    files = {path.stem: path for path in sorted((sailor / "profiles/OPT-350").glob("*.json"))}
    return {**{name: importers.pipedream({"V100": PROFILES / name}) for name in GRAPHS},
            "piper/bert32": importers.piper({"A100": PROFILES / "piper/bert32a100.json"}),
            "sailor/OPT-350": importers.sailor(files, sailor / "llm_info.json", "OPT-350", 1)}


def problems(measured: dict[str, MeasuredChain]) -> Iterator[tuple[str, Problem]]:
    """(profile, problem): each chain on eight devices of its types in two to four machines, 10 to 100 Gbit/s between
    them and ten times that inside, with a device a stage and in groups."""
    rng = np.random.default_rng(0)
    for name, chain in measured.items():
        for S in (8, 4):
            node = np.sort(rng.integers(0, rng.integers(2, 5), 8))
            types = [chain.types[(n + 2) % len(chain.types)] for n in node]
            pair = np.triu(rng.uniform(1.25e9, 12.5e9, (8, 8)), 1)
            bandwidth = (pair + pair.T) * np.where(node[:, None] == node, 10.0, 1.0)
            yield name, chain.problem(types, 80e9, bandwidth, 20e-6, stages=S, micro_batches=4 * S,
                                      schedule=SCHEDULES[int(rng.integers(2))],
                                      transfers=TRANSFERS[int(rng.integers(2))])


def gaps(checkpoint: Path = CHECKPOINT) -> pd.DataFrame:
    """A row a problem: profile, stages, schedule, transfers, and in % over long annealing NNPiper in the fixed setting
    and its network alone, means over SEEDS of the solver; NaN where a plan does not fit."""
    return pd.DataFrame(list(each(partial(_gap, checkpoint=checkpoint), list(problems(chains())))))


def _gap(task, checkpoint):
    name, problem = task
    best_s = judge(problem, baselines.anneal.solve(problem))["step_s"]
    row = {"profile": name, "stages": problem.stages, "schedule": problem.schedule, "transfers": problem.transfers}
    for part, polish in (("nnpiper", True), ("network", False)):
        plans = [judge(problem, piper(checkpoint).solve(problem, seed=seed, polish=polish)) for seed in range(SEEDS)]
        over = [plan["step_s"] / best_s - 1 if plan["feasible"] else np.nan for plan in plans]
        row[f"{part} [%]"] = round(100 * float(np.mean(over)), 6)
    return row


if __name__ == "__main__":
    write_text(SHIPPED, csv_text(gaps()))
    print(pd.read_csv(SHIPPED).to_string())
