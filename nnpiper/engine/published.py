"""Published measurements: training steps that Sailor's authors measured, beside this artifact's predictions.

The runs (Strati et al. 2025, SOSP; github.com/eth-easl/sailor, MIT) trained OPT-350 with Megatron-DeepSpeed, on 1 to 32
GH200 nodes and on a cluster of RTX-3090, RTX-2080 and Titan-RTX nodes. Their files are read where they lie in a folder
beside the repository; nothing of them is shipped but this artifact's errors, which `python -m
nnpiper.engine.published` computes.

Symbols: S stages, M micro-batches, n replicas of every stage, t GPUs of a replica (tensor parallelism, within one
node). How a run is read: a device is a replica's t GPUs with the profile of that degree; a micro-batch of the problem
is n of the run's, one a replica; links carry the peak rate of one GPU on either side, since every GPU sends what it
holds over a link of its own; latency 0, since the files have none.

What the plain model takes differently from the engine is tried one change at a time, each on all runs of a cluster:

- equal shares: DeepSpeed gives every replica micro-batches of one size, so that a stage is as slow as its slowest
  replica; the cost model shares each micro-batch by speed. This is part of the plan that was run, not of the costs.
- one card: the t GPUs of a node reduce their gradients over one network card (importers.sailor, shared_card).
- copies: each of the t GPUs also sends its own copy of the activation over that card.
- both sides: a transfer keeps sender and receiver busy, one transfer after the other, in DeepSpeed's order (its
  pipeline engine receives and sends in separate, blocking calls). The order is that of its main branch (commit
  83fd8f8); before its issue 2800 (2023) a tick exchanged the other way round. Which of them ran is not in the files.
- update: the optimizer's update, by the profile, comes after the all-reduce.
- tied: first and last stage sum the gradients of their copies of the embedding.
- 2 bytes: gradients of 2 bytes a number instead of 4.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field

from .. import cost, importers
from ..cost import StageArrays
from ..paths import DATA, PROFILES
from ..problem import InputError, Problem, Strategy, read_json, write_text
from ..profile_formats import SailorProfile
from ..report import csv_text
from ..schedule import B, F, stage_order
from ..simulator import simulate

FOLDER = PROFILES / "sailor"
SHIPPED = DATA / "engine" / "published_steps.csv"
SOURCE = "github.com/eth-easl/sailor, commit cf2c8e3, MIT licence"
MODEL = "OPT-350"
AMPLE_BYTES = 1e15  # the runs did fit; memory is not predicted here
CLUSTERS = ("gh200", "mixed")

# name: (whether shares are equal, what else differs from the plain model)
CHANGES = {
    "plain": (False, {}),
    "plain, one card": (False, {"one_card": True}),
    "equal shares": (True, {}),
    "overlapped": (True, {"transfers": "overlapped"}),
    "one card": (True, {"one_card": True}),
    "copies": (True, {"copies": True}),
    "both sides": (True, {"both_sides": True}),
    "update": (True, {"update": True}),
    "tied": (True, {"tied": True}),
    "2 bytes": (True, {"gradient_part": 0.5}),
    "one card, both sides": (True, {"one_card": True, "both_sides": True}),
}


_Nodes = Annotated[list[tuple[str, int, str]], Field(min_length=1, max_length=1)]  # type, GPUs, zone


class _Replicas(BaseModel):
    layers_per_stage: list[list[int]]
    tmp_per_stage: list[Annotated[list[tuple[_Nodes, int]], Field(min_length=1)]]


class _RunFile(BaseModel):
    zone: str
    pipeline_list: Annotated[list[_Replicas], Field(min_length=1, max_length=1)]
    mbs: Annotated[int, Field(ge=1)]
    gbs: Annotated[int, Field(ge=1)]
    real: Annotated[float, Field(gt=0)]
    red_grads: Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Run:
    """One measured run.

    cuts: S - 1 layer indices; devices: S tuples of n types, one a replica; tensor_parallel: t
    micro_batch_size: sequences of a replica's micro-batch; micro_batches: M
    measured_s: the step; reduce_s: the part of it that the authors' clock gave to the gradients' reduction
    """

    name: str
    zone: str
    cuts: tuple[int, ...]
    devices: tuple[tuple[str, ...], ...]
    tensor_parallel: int
    micro_batch_size: int
    micro_batches: int
    measured_s: float
    reduce_s: float

    @property
    def cluster(self) -> str:
        return self.name.partition("_")[0]

    @property
    def strategy(self) -> Strategy:
        n = len(self.devices[0])
        return Strategy(self.cuts, tuple(tuple(range(n * s, n * s + n)) for s in range(len(self.devices))))


def read_run(path: Path) -> Run:
    """A file of measured_steps. Raises InputError: one line with file, field, value and what is allowed."""
    file = read_json(path, _RunFile)
    plan = file.pipeline_list[0]
    listed = [layer for stage in plan.layers_per_stage for layer in stage]
    if listed != list(range(len(listed))):
        raise InputError(f"{path}: layers_per_stage: {plan.layers_per_stage}; allowed: a chain 0, 1, 2 and so on")
    replicas = [[(nodes[0][0], degree) for nodes, degree in stage] for stage in plan.tmp_per_stage]
    n, degrees = len(replicas[0]), {degree for stage in replicas for _, degree in stage}
    if len(degrees) != 1 or any(len(stage) != n for stage in replicas) or file.gbs % (n * file.mbs):
        raise InputError(f"{path}: tmp_per_stage with gbs {file.gbs}, mbs {file.mbs}; allowed: as many replicas in "
                         "every stage, all of one tensor-parallel degree, and gbs a multiple of replicas x mbs")
    return Run(path.stem.replace("plan_config_", ""), file.zone, tuple(stage[0] for stage in plan.layers_per_stage[1:]),
               tuple(tuple(name for name, _ in stage) for stage in replicas), degrees.pop(), file.mbs,
               file.gbs // (n * file.mbs), file.real, file.red_grads)


def read_runs(folder: Path = FOLDER) -> list[Run]:
    """All runs of a folder with Sailor's files, by cluster and size. Raises InputError, also where there are none."""
    runs = [read_run(path) for path in (folder / "measured_steps").glob("*.json")]
    if not runs:
        raise InputError(f"{folder / 'measured_steps'}: no *.json; allowed: a folder with one file a run")
    return sorted(runs, key=lambda run: (run.cluster, len(run.devices) * len(run.devices[0]), run.name))


def problem(run: Run, folder: Path = FOLDER, equal_shares: bool = True, one_card: bool = False) -> Problem:
    """A run as a Problem, for run.strategy. With equal shares every device of a group has the times of its slowest.
    Raises InputError."""
    types = [name for stage in run.devices for name in stage]
    n, files = len(run.devices[0]), {name: _profile(folder, name) for name in types}
    chain = importers.sailor(files, folder / "llm_info.json", MODEL, run.micro_batch_size, run.tensor_parallel,
                             one_card)
    bandwidth = importers.sailor_bandwidth(folder / "intra_node_bandwidths.json",
                                           folder / "multizone_bandwidths_het.json", types, range(len(types)), run.zone)
    timed = types
    if equal_shares:
        both, bounds = chain.forward_s + chain.backward_s, [0, *run.cuts, chain.layers]
        slowest = [max(stage, key=lambda name: both[lo:hi, chain.types.index(name)].sum())
                   for stage, lo, hi in zip(run.devices, bounds, bounds[1:])]
        timed = [name for name in slowest for _ in range(n)]
    one = chain.problem(timed, AMPLE_BYTES, bandwidth, 0.0, len(run.devices), run.micro_batches)
    return one.replace(forward_s=n * one.forward_s, backward_s=n * one.backward_s, output_bytes=n * one.output_bytes)


def predict(run: Run, change: str = "plain", folder: Path = FOLDER) -> float:
    """Step in s of a run by the cost model with one of CHANGES. Raises InputError."""
    equal_shares, other = CHANGES[change]
    asked = problem(run, folder, equal_shares, other.get("one_card", False))
    stages = cost.stage_arrays(asked, run.strategy)
    all_reduce_s = stages.all_reduce_s * other.get("gradient_part", 1.0)
    if other.get("update"):
        all_reduce_s = all_reduce_s + _update_s(run, folder)
    if other.get("tied") and len(run.devices) > 1:
        first, last = (group[0] for group in (run.strategy.groups[0], run.strategy.groups[-1]))
        ends = np.zeros(len(run.devices))
        ends[[0, -1]] = asked.gradient_bytes[-1] / asked.bandwidth_bytes_per_s[first, last]
        all_reduce_s = all_reduce_s + ends
    copies = run.tensor_parallel if other.get("copies") else 1
    changed = StageArrays(stages.forward_s, stages.backward_s, copies * stages.send_forward_s,
                          copies * stages.send_backward_s, all_reduce_s)
    if other.get("both_sides"):
        return one_by_one(changed, run.micro_batches)
    return simulate(changed, "1f1b", run.micro_batches, other.get("transfers", "blocking"))


def one_by_one(stages: StageArrays, M: int) -> float:
    """Step in s of 1F1B where a transfer starts when its sender and its receiver have come to it and keeps both until
    it has arrived. Between two operations a stage sends the first one's output and receives the second one's input:
    first it sends, but from a forward pass to a backward pass that come at neighbouring ticks of DeepSpeed's
    TrainSchedule it first receives."""
    S = len(stages.forward_s)
    programs, now = [_serial_program(s, S, M) for s in range(S)], [0.0] * S
    compute_s, send_s = (stages.forward_s, stages.backward_s), (stages.send_forward_s, stages.send_backward_s)
    while any(programs):
        left = sum(map(len, programs))
        for s, program in enumerate(programs):
            while program and len(program[-1]) == 1:
                now[s] += compute_s[program.pop()[0]][s]
        for s in range(S - 1):
            here, there = programs[s], programs[s + 1]
            if here and there and here[-1] == there[-1]:
                kind, _, _ = here.pop()
                there.pop()
                now[s] = now[s + 1] = max(now[s], now[s + 1]) + send_s[kind][s]
        assert sum(map(len, programs)) < left, "every stage waits"
    return float(max(end + all_reduce for end, all_reduce in zip(now, stages.all_reduce_s)))


def _serial_program(s, S, M):
    """What stage s does, last first: (kind,) computes, (kind, boundary, micro-batch) sends or receives."""
    order = [tuple(operation) for operation in stage_order("1f1b", S, M)[s].tolist()]
    steps = []
    for before, after in zip([None, *order], [*order, None]):
        sent = _message(before, s, S) if before else []
        received = _message(after, s - 1 if after[0] == F else s + 1, S) if after else []
        neighbours = before and after and before[0] == F and after == (B, before[1] - (S - s - 1))
        steps += received + sent if neighbours else sent + received
        steps += [(after[0],)] if after else []
    return steps[::-1]


def _message(operation, s, S):
    """[the transfer of an operation's output from stage s], [] where there is none."""
    kind, m = operation
    boundary = s if kind == F else s - 1
    return [(kind, boundary, m)] if 0 <= s < S and 0 <= boundary < S - 1 else []


def errors(runs: list[Run], folder: Path = FOLDER) -> pd.DataFrame:
    """One row a run: its shape and, for each of CHANGES, the error of the predicted step in % of the measured one."""
    return pd.DataFrame([{
        "run": run.name, "stages": len(run.devices), "replicas": len(run.devices[0]), "GPUs each": run.tensor_parallel,
        "micro-batch": run.micro_batch_size, "M": run.micro_batches,
        **{change: 100 * (predict(run, change, folder) / run.measured_s - 1) for change in CHANGES}} for run in runs])


def steps(runs: list[Run], folder: Path = FOLDER) -> pd.DataFrame:
    """Measured and predicted steps in s of the runs."""
    shown = ("plain", "equal shares", "overlapped", "one card", "both sides")
    return pd.DataFrame([{
        "run": run.name, "measured": run.measured_s, **{change: predict(run, change, folder) for change in shown},
        "reduction, measured": run.reduce_s,
        "reduction, one card": float(cost.stage_arrays(problem(run, folder, one_card=True), run.strategy)
                                     .all_reduce_s.max())} for run in runs])


def mean_errors(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and largest |error| in % of each change, over a cluster's runs in a table of `errors`; of the GH200 runs
    those with a micro-batch of 8 also apart, since the profile at 1 is not that of the runs (one sequence takes longer
    there than two)."""
    gh, mixed = (table[table.run.str.startswith(name)] for name in CLUSTERS)
    parts = {"gh200, all": gh, "gh200 without N1": gh[~gh.run.str.contains("_N1_")],
             "gh200, micro-batch 8": gh[gh["micro-batch"] == 8], "mixed": mixed}
    return pd.DataFrame([{
        "change": change, **{column: value for name, part in parts.items() for column, value in (
            (f"{name} ({len(part)} runs)", part[change].abs().mean()), (f"{name}, worst", part[change].abs().max()))}}
        for change in CHANGES])


def save(table: pd.DataFrame, path: Path) -> None:
    """Write a table of `errors` with its source as csv, as the repository ships it (SHIPPED). Raises OSError."""
    write_text(path, csv_text(table.assign(source=SOURCE)))


def _profile(folder, name):
    return folder / "profiles" / MODEL / f"{name}.json"


def _update_s(run, folder):
    """[S] s of the optimizer's update, of the slowest replica."""
    times = {}
    for name in {name for stage in run.devices for name in stage}:
        sizes = read_json(_profile(folder, name), SailorProfile).root
        layers = sizes[str(run.micro_batch_size)][str(run.tensor_parallel)]
        times[name] = np.array([layers[str(i)][2] for i in range(len(layers))])
    bounds = [0, *run.cuts, None]
    return np.array([max(times[name][lo:hi].sum() for name in stage)
                     for stage, lo, hi in zip(run.devices, bounds, bounds[1:])])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nnpiper.engine.published",
                                     description="Errors of the predicted steps of Sailor's runs (seconds).")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="Sailor's files")
    parser.add_argument("--out", type=Path, default=Path("runs/published_steps.csv"), metavar="FILE.csv",
                        help="default: %(default)s")
    asked = parser.parse_args()
    try:
        save(errors(read_runs(asked.folder), asked.folder), asked.out)
    except (InputError, OSError) as error:
        sys.exit(f"published: {error}")


if __name__ == "__main__":
    main()
