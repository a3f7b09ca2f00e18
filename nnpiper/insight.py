"""Insight: what the network has learned, and what its training reads.

Symbols: K devices, S stages.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from .batch import Batch
from .experiments import Case, piper
from .network import Network, State
from .paths import ROOT
from .problem import Problem
from .solver import NNPiper


def transfer_times(problem: Problem) -> np.ndarray:
    """[K, K] s of a mean activation over the link from k to j; NaN on the diagonal."""
    output = problem.output_bytes[:-1].mean()
    times = problem.latency_s + output / problem.bandwidth_bytes_per_s
    return np.where(np.eye(problem.devices, dtype=bool), np.nan, times)


def speeds(problem: Problem) -> np.ndarray:
    """[K] share of each device in the summed speed."""
    speed = 1.0 / (problem.forward_s + problem.backward_s).sum(axis=0)
    return speed / speed.sum()


@torch.inference_mode()
def first_and_next(network: Network, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """[K] probability that the network opens stage 0 with device k, and [K, K] that after stage 0 on device k (alone)
    it opens stage 1 with device j; NaN on the diagonal."""
    K = problem.devices
    f = network.features(Batch.of([problem]))
    e = network.encode(f)
    none = torch.zeros(1, 1, K)
    nothing = State(none.bool(), none, none, torch.full((1, 1), K), torch.zeros(1, 1, dtype=torch.long))
    first = network.logits(f, e, nothing)[0, 0, :K].softmax(-1)
    one = torch.eye(K)[None]
    after = State(one.bool(), one, torch.zeros_like(one), torch.arange(K)[None], torch.ones(1, K, dtype=torch.long))
    following = network.logits(f, e, after)[0, :, :K].softmax(-1).double().numpy()
    np.fill_diagonal(following, np.nan)
    return first.double().numpy(), following


def habits(case: Case, checkpoint: Path) -> list[dict]:
    """Rows of one case with a device a stage, of the network's likeliest plan and of that of an untrained network:
    link_ratio, geometric mean of the times of the links it uses over that of all links; share_correlation, rank
    correlation of the stages' work with their devices' speed."""
    problem = case.problem()
    torch.manual_seed(0)
    untrained = NNPiper(Network(piper(checkpoint).network.size).eval())
    rows = []
    for name, solver in (("trained", piper(checkpoint)), ("untrained", untrained)):
        strategy = solver.solve(problem, polish=False, samples=1)
        devices = [group[0] for group in strategy.groups]
        times = np.log(transfer_times(problem))
        used = times[devices[:-1], devices[1:]]
        work = (problem.forward_s + problem.backward_s).mean(axis=1)
        shares = np.add.reduceat(work, strategy.bounds(problem.layers)[:-1])
        rows.append(case.fields | {"network": name, "link_ratio": float(np.exp(used.mean() - np.nanmean(times))),
                                   "share_correlation": rank_correlation(shares, speeds(problem)[devices])})
    return rows


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation of two vectors, equal values at their mean rank; 0 where one is constant."""
    ranks = [(np.searchsorted(np.sort(x), x, "left") + np.searchsorted(np.sort(x), x, "right")) / 2 for x in (a, b)]
    if min(rank.std() for rank in ranks) == 0.0:
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def files_read_by_training(steps: int = 1) -> list[str]:
    """Every file that a training opens to read, by Python's audit hook in a process of its own; without the code of the
    interpreter, of the packages and of this one, and without what the system says of itself (/proc, /sys). Files in
    the repository by their path within it."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", _AUDITED, folder, str(steps)], cwd=ROOT, check=True,
                              capture_output=True, text=True)
        opened = [Path(name) for name in json.loads(done.stdout.splitlines()[-1])]
    # the virtual environment may lie inside the repository
    elsewhere = {"/proc", "/sys", "/dev", sys.prefix, sys.base_prefix, os.environ["NUMBA_CACHE_DIR"]}
    return sorted(path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path) for path in opened
                  if path.is_file() and path.suffix not in (".py", ".pyc", ".so")
                  and not path.parent.name.endswith(".egg-info")  # of the editable installation
                  and not any(path.is_relative_to(place) for place in elsewhere))


_AUDITED = """
import json, os, sys
opened = set()
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and "w" not in str(arguments[1] or "r"):
        opened.add(os.path.abspath(os.fsdecode(arguments[0])))
sys.addaudithook(hook)
from nnpiper import vcta
vcta.train(sys.argv[1], vcta.Recipe(steps=int(sys.argv[2]), instances=2), progress=False)
print(json.dumps(sorted(opened)))
"""
