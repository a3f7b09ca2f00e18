"""A real model in a real engine: GPT-2 small split over three unequal devices, predicted and measured.

The layers are those of `nnpiper profile` with random weights, the engine is torch.distributed.pipelining over gloo on
the loopback interface. Nothing is fitted: layer times come from a pass through the chain in one of the processes, times
each device's slowness (real_stage.py says how a device is slowed down); the link comes from a ping-pong between two of
them. Both come before the first plan runs. The raw measurements are a table of one row a step.

Symbols: L layers, S = K = 3 stages and devices, M micro-batches of one sequence.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd

from .. import cost, provenance
from ..cost import StageArrays
from ..paths import DATA
from ..problem import SCHEDULES, Problem, Strategy, write_text
from ..report import csv_text
from ..simulator import simulate, step_time
from ..solver import NNPiper
from ..workload import MODELS, Model

MODEL, SEQUENCE_LENGTH, MICRO_BATCHES = "gpt2", 32, 4
SLOWNESS = (6.0, 3.5, 2.5)  # of the devices; 1/6 + 1/3.5 + 1/2.5 = 0.85 cores of work at most
STEPS = 5  # measured, after one that warms up
PROBE_REPEATS, PROFILE_REPEATS = 50, 6
BYTES = 4  # of a number: 32 bit, as the profiler measures on a CPU
SHIPPED = DATA / "engine" / "gpt2_steps.csv"


class Processes:
    """The processes of a pipeline, ready for jobs; use it in a `with`. Raises RuntimeError where one of them dies."""

    def __init__(self, model: Model, sequence_length: int, count: int = len(SLOWNESS)):
        self.common = {"model": asdict(model), "sequence_length": sequence_length}
        self.folder = tempfile.TemporaryDirectory()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.started = [subprocess.Popen(
            [sys.executable, "-m", "nnpiper.engine.real_stage", str(rank), str(count), self.folder.name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) for rank in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started:
            process.kill()
            process.communicate()
        self.folder.cleanup()

    def __call__(self, do: str, **job) -> list:
        """Answers of all ranks to one job of real_stage.py."""
        line = json.dumps({"do": do, **self.common, **job}) + "\n"
        for rank, process in enumerate(self.started):
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                self._ended(rank)
        answers = {}
        while len(answers) < len(self.started):  # of whoever is ready: the others of one that died would wait for long
            waiting = {process.stdout: rank for rank, process in enumerate(self.started) if rank not in answers}
            for stream in select.select(list(waiting), [], [])[0]:
                rank, answer = waiting[stream], stream.readline()
                if not answer:
                    self._ended(rank)
                answers[rank] = json.loads(answer)
        return [answers[rank] for rank in range(len(self.started))]

    def _ended(self, rank):
        raise RuntimeError(f"stage {rank} ended with exit code {self.started[rank].wait()}")


def link(ask: Processes, activation_bytes: int) -> tuple[float, float]:
    """(latency_s, bandwidth_bytes_per_s) of a link such that a number and an activation take their median times."""
    small, large = (float(np.median(times)) for times in ask("probe", repeats=PROBE_REPEATS)[0])
    return small, (activation_bytes - BYTES) / max(large - small, 1e-9)


def problem(model: Model, sequence_length: int, micro_batches: int, schedule: str, profile: list[list[float]],
            latency_s: float, bandwidth_bytes_per_s: float, slowness: tuple[float, ...] = SLOWNESS) -> Problem:
    """The split as a Problem: profile [L][forward s, backward s] at slowness 1; memory is left out."""
    forward_s, backward_s = (np.outer(times, slowness) for times in np.transpose(profile))
    L, K = forward_s.shape
    output = np.full(L, float(sequence_length * model.hidden * BYTES))
    output[-1] = 0.0
    links = np.full((K, K), bandwidth_bytes_per_s), np.full((K, K), latency_s)
    nothing = np.zeros(L)
    return Problem(forward_s, backward_s, output, nothing, nothing, nothing, np.ones(K), *links, K, micro_batches,
                   schedule)


def plans(asked: Problem, checkpoint: Path | None = None) -> dict[str, Strategy]:
    """NNPiper's plan, the same with its fastest and slowest device swapped, and the even split of the layers."""
    best = NNPiper.from_pretrained(checkpoint).solve(asked)
    speed = asked.forward_s.sum(axis=0)
    slow, fast = int(speed.argmax()), int(speed.argmin())
    other = {slow: fast, fast: slow}
    swapped = Strategy(best.cuts, tuple(tuple(other.get(k, k) for k in group) for group in best.groups))
    L, S = asked.layers, asked.stages
    even = Strategy(tuple(-(-L * s // S) for s in range(1, S)), tuple((k,) for k in range(S)))
    return {"NNPiper": best, "even": even, "swapped": swapped}


def run(steps: int = STEPS, model: Model = MODELS[MODEL], sequence_length: int = SEQUENCE_LENGTH,
        micro_batches: int = MICRO_BATCHES, checkpoint: Path | None = None,
        progress: Callable[[str], None] = print) -> tuple[pd.DataFrame, dict]:
    """Profile, plan, run, and profile again: (one row a step, what else was measured). Raises RuntimeError."""
    with Processes(model, sequence_length) as ask:
        progress("profile")
        profile = ask("profile", slowness=min(SLOWNESS), repeats=PROFILE_REPEATS)[0]
        latency_s, bandwidth = link(ask, sequence_length * model.hidden * BYTES)
        unsplit = ask("whole", micro_batches=micro_batches)[0]
        asked = {name: problem(model, sequence_length, micro_batches, name, profile, latency_s, bandwidth)
                 for name in SCHEDULES}
        todo = [(name, schedule, plan) for schedule in SCHEDULES
                for name, plan in plans(asked[schedule], checkpoint).items()]
        rows, differences = [], []
        for name, schedule, plan in todo:
            progress(f"{name}, {schedule}")
            answers = ask("run", counts=_counts(plan, asked[schedule]), slowness=[SLOWNESS[k] for k, in plan.groups],
                          micro_batches=micro_batches, schedule=schedule, steps=1 + steps)
            rows += _rows(name, schedule, plan, asked[schedule], answers)
            differences.append(_difference(unsplit, answers))
        again = ask("profile", slowness=min(SLOWNESS), repeats=PROFILE_REPEATS)[0]
    loss, gradient = np.max(differences, axis=0)
    return pd.DataFrame(rows), {
        "model": model.name, "sequence_length": sequence_length, "micro_batches": micro_batches, "slowness": SLOWNESS,
        "profile_s": profile, "latency_s": latency_s, "bandwidth_bytes_per_s": bandwidth, "profile_again_s": again,
        "largest_relative_loss_difference": loss, "largest_relative_gradient_difference": gradient,
        "date": datetime.now(UTC).isoformat(timespec="minutes"), "environment": provenance.environment()}


def drift(profile: list[list[float]], again: list[list[float]]) -> tuple[float, float]:
    """How far the profile [L][forward s, backward s] differs when it is taken again, as parts of its sum: the change of
    the sum, and the sum of the absolute changes, in which a faster layer does not make up for a slower one."""
    change, whole = np.subtract(again, profile), np.sum(profile)
    return float(change.sum() / whole), float(np.abs(change).sum() / whole)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """One row a plan and schedule, times in s, errors in % of the measured step. `error` is the prediction's; `schedule
    alone` the error where the simulator gets the stages' times as they were in the measured steps. One step has no
    spread (NaN)."""
    out = []
    for (plan, schedule), part in rows[rows.step > 0].groupby(["plan", "schedule"], sort=False):
        measured, first = part.measured_s.median(), part.iloc[0]
        out.append({
            "plan": plan, "schedule": schedule, "layers": first.layers, "devices": first.devices,
            "predicted [s]": first.predicted_s, "measured [s]": measured, "steps": len(part),
            "spread [%]": 100 * (part.measured_s.max() - part.measured_s.min()) / measured if len(part) > 1 else np.nan,
            "error [%]": 100 * (first.predicted_s / measured - 1),
            "schedule alone [%]": 100 * float((part.replayed_s / part.measured_s - 1).median()),
            "late [%]": 100 * float((part.late_s / part.measured_s).median())})
    return pd.DataFrame(out)


def _counts(plan, asked):
    return np.diff([0, *plan.cuts, asked.layers]).tolist()


def _rows(name, schedule, plan, asked, answers):
    """One row a step, number 0 warms up. replayed_s: the simulator's step from this step's own mean stage times;
    late_s: the most, over the stages, that their operations together were late."""
    predicted_s, stages = step_time(asked, plan), cost.stage_arrays(asked, plan)
    rows = []
    for step in range(len(answers[0]["spans"])):
        spans = np.array([answer["spans"][step] for answer in answers])
        operations = [answer["operations"][step] for answer in answers]
        took = {kind: np.array([np.mean([o[3] - o[2] for o in of_stage if o[0] == kind]) for of_stage in operations])
                for kind in "FB"}
        replayed = StageArrays(took["F"], took["B"], stages.send_forward_s, stages.send_backward_s, stages.all_reduce_s)
        rows.append({
            "plan": name, "schedule": schedule, "layers": "+".join(map(str, _counts(plan, asked))),
            "devices": " ".join(str(k) for k, in plan.groups), "step": step, "predicted_s": predicted_s,
            "measured_s": spans[:, 1].max() - spans[:, 0].min(),
            "replayed_s": simulate(replayed, schedule, asked.micro_batches, asked.transfers),
            "late_s": max(sum(o[5] for o in of_stage) for of_stage in operations),
            **{f"{word}_{s}_s": took[kind][s] for kind, word in (("F", "forward"), ("B", "backward"))
               for s in range(asked.stages)},
            **{f"predicted_{word}_{s}_s": times[s] for word, times in (("forward", stages.forward_s),
                                                                     ("backward", stages.backward_s))
               for s in range(asked.stages)}})
    return rows


def _difference(unsplit, answers):
    """(largest relative difference of a loss in any step, of a parameter's gradient norm in the first)."""
    expected = np.array(unsplit["losses"])
    loss = np.abs(np.array(answers[-1]["losses"]) / expected - 1).max()
    norms = [np.array([pair[1] for pair in pairs]) for pairs in (
        unsplit["gradients"], [pair for answer in answers for pair in answer["gradients"]])]
    return loss, np.abs(norms[1] / norms[0] - 1).max()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nnpiper.engine.real_model",
                                     description="Measure GPT-2 small on three unequal devices (about 6 minutes).")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt2_steps.csv"), metavar="FILE.csv",
                        help="raw measurements; a json goes beside them (default: %(default)s)")
    out = parser.parse_args().out
    if out.suffix != ".csv" or out.is_dir():
        parser.error(f"--out: {out}; allowed: a csv file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out.parent).close()  # a folder that takes no files shall not cost the measurement
        rows, more = run()
        write_text(out, csv_text(rows))
        write_text(out.with_suffix(".json"), json.dumps(more, indent=1) + "\n")
    except (OSError, RuntimeError) as error:
        sys.exit(f"real_model: {error}")
    print(summary(rows).to_string())
    print("profile taken again: {:+.1%} of the sum, {:.1%} absolute".format(
        *drift(more["profile_s"], more["profile_again_s"])))
    print(f"largest relative difference from the unsplit model: loss {more['largest_relative_loss_difference']:.1e}, "
          f"gradient {more['largest_relative_gradient_difference']:.1e}")


if __name__ == "__main__":
    main()
