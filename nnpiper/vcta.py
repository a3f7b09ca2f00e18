"""The Virtual Contrastive Training Algorithm (VCTA): the network learns from virtual instances alone.

Each step draws fresh virtual instances and lets the network draw N groupings for each, and R divisions of the layers
for each grouping. All run on the exact simulator and are contrasted: the groupings of an instance (by their best
division) with each other, and the divisions of a grouping with each other, so that neither is judged by the other's
luck; of the groupings that this loss does not read, the divisions are left out, too, which saves their gradients. The
best one b shall become likelier than the others j of a spread, SPREAD of them at even ranks,

    loss = - mean over j of log sigmoid(BETA step(j) / step(b) (log p(b) - log p(j))) / BETA,

with the ratio of the steps kept within 0.1 and 10 and equal ones left out, since the solver uses the best of many
samples. The number of groupings grows as the training goes on (GROWTH), since the better the network is, the less the
best of a few tells. The paper states the algorithm's name and purpose; this loss, after BOPO (Liao et al. 2025), is
this artifact's choice, and `losses` has others to compare it with. Everything
random in step t follows from (seed, t, rank), so a resumed run goes on exactly as the unbroken one.
"""

import contextlib
import csv
import io
import json
import os
import pickle
import platform
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import distributed
from tqdm import tqdm

from . import checkpoint, losses, virtual
from .batch import Batch, disassemble
from .losses import LOSSES
from .network import Groupings, Network, Size, join
from .problem import InputError, write_bytes, write_text
from .search import Search, device_speed, layer_work, random_state, restarts
from .starts import best_start

LOG_FIELDS = ["step", "minutes", "loss", "gap_greedy", "gap_best", "gap_groups_greedy", "gap_groups_best"]
# until which part of the steps a growing contrast has how many times the groupings
GROWTH = (0.5, 1), (0.8, 2), (1.0, 4)
POLISHED, IMITATED = (0.02, 5e-4), (0.1, 5e-4)  # temperatures, relative to the step: of a good plan, of a plain one


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    steps: int = 26000
    seed: int = 0
    instances: int = 64  # a step, over all processes, of K <= 16 devices; of more devices fewer, for equal work
    groupings: int = 16  # N, an instance
    grows: bool = True  # the contrast, by GROWTH
    divisions: int = 4  # R, a grouping
    loss: str = "best-against-spread"  # of `losses.LOSSES`; "imitation" draws nothing and learns the polished plain starts
    polish: int = 0  # moves of local search that an instance's best strategy makes to join the contrast; 0: none
    learning_rate: float = 1e-3
    blind: str = ""
    size: Size = Size()
    log_rows: int = 40  # each with the gaps of the validation, which take seconds; 0: no log
    start: str = ""  # the checkpoint whose weights the training starts with; "": random ones

    def __post_init__(self):
        if self.loss not in LOSSES:
            raise InputError(f"loss: {self.loss!r}; allowed: {', '.join(LOSSES)}")

    def groupings_at(self, step: int) -> int:
        """N in training step number `step`."""
        return self.groupings * next(times for part, times in GROWTH if not self.grows or step < part * self.steps)


def train(out: Path, recipe: Recipe = Recipe(), progress: bool = True) -> Path:
    """Train into the folder `out`, or go on from the last state there; returns the checkpoint's path. Under torchrun
    the instances of a step are shared out and gradients averaged over gloo.

    Writes nnpiper.pt and nnpiper.json (the card) at the end, log.csv and resume.pt on the way. Raises InputError where
    `out` holds a run with another recipe.
    """
    with _processes() as (rank, world):
        return _train(Path(out), recipe, progress and rank == 0, rank, world)


def _train(out, recipe, progress, rank, world):
    target, resume, log = out / "nnpiper.pt", out / "resume.pt", out / "log.csv"
    out.mkdir(parents=True, exist_ok=True)  # says at once, not after minutes, that a folder cannot be made
    torch.manual_seed(recipe.seed)
    network = (checkpoint.load(Path(recipe.start)).train().requires_grad_() if recipe.start
               else Network(recipe.size, recipe.blind))
    start = ({"start": json.loads(checkpoint.card_path(Path(recipe.start)).read_text(encoding="utf-8"))}
             if recipe.start else {})
    optimizer = torch.optim.AdamW(network.parameters(), lr=recipe.learning_rate, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=recipe.steps,
                                               pct_start=0.05 if recipe.steps > 20 else 0.3)  # at 20 it would fail
    done, rows, losses, minutes = 0, [], [], 0.0
    if resume.exists():
        try:
            state = torch.load(resume, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            raise InputError(f"{resume}: cannot be read: {checkpoint.first_line(error)}; allowed: a state that "
                             "`nnpiper train` wrote, or no such file") from None
        if state["recipe"] != asdict(recipe):
            raise InputError(f"{resume}: recipe {state['recipe']}; allowed: {asdict(recipe)}, or an empty folder")
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        rate.load_state_dict(state["rate"])
        done, rows, losses, minutes = state["done"], state["rows"], state["losses"], state["minutes"]
    validates = rank == 0 and recipe.log_rows > 0 and done < recipe.steps
    validation = Validation(recipe.seed, instances=min(24, recipe.steps)) if validates else None
    begin, saved = time.perf_counter() - 60 * minutes, time.perf_counter()
    for step in tqdm(range(done, recipe.steps), initial=done, total=recipe.steps, disable=not progress,
                     mininterval=1.0):
        loss = contrast_step(network, recipe, step, rank, world)
        optimizer.zero_grad()
        loss.backward()
        _average_gradients(network, world)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        rate.step()
        losses.append(loss.item())
        last = step + 1 == recipe.steps
        if validation and ((step + 1) % max(recipe.steps // recipe.log_rows, 1) == 0 or last):
            rows.append([step + 1, (time.perf_counter() - begin) / 60, float(np.mean(losses)),
                         *validation.gaps(network)])
            losses = []
        if rank == 0 and (time.perf_counter() - saved > 30 or last):
            saved = time.perf_counter()
            minutes = (saved - begin) / 60
            _write_log(log, rows)
            buffer = io.BytesIO()
            torch.save({"recipe": asdict(recipe), "network": network.state_dict(), "optimizer": optimizer.state_dict(),
                        "rate": rate.state_dict(), "done": step + 1, "rows": rows, "losses": losses,
                        "minutes": minutes}, buffer)
            write_bytes(resume, buffer.getvalue())
    if rank == 0:
        checkpoint.save(network, target, _history(recipe, start, minutes, world))
    return target


def contrast_step(network: Network, recipe: Recipe, step: int, rank: int = 0, world: int = 1) -> torch.Tensor:
    """The loss of training step number `step`, with gradient."""
    size = virtual.sizes(np.random.default_rng([recipe.seed, step]))  # the same for all processes
    rng = np.random.default_rng([recipe.seed, step, rank + 1])
    instances = recipe.instances * min(1.0, 16 / size["K"]) ** 1.5
    problems = virtual.draw(rng, max(round(instances / world), 1), **size)
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    f = network.features(problems)
    encoding = network.encode(f)
    if recipe.loss == "imitation":
        starts = (best_start(problems.problem(a), rng) for a in range(len(problems.forward_s)))
        best_plans, share = annealed(problems, list(starts), recipe.polish, IMITATED, rng)
        plans = network.replay(f, best_plans)
        divisions = network.divide(f, encoding, plans)
        return (losses.imitation(network.log_prob(f, encoding, plans))
                + losses.imitation(divisions.log_prob(divisions.around(share, 1, generator))))
    plans = network.draw(f, encoding, recipe.groupings_at(step), generator)
    reads = losses.READS.get(recipe.loss)  # only the groupings that the loss reads get a gradient
    with torch.set_grad_enabled(reads is None):
        divisions = network.divide(f, encoding, plans)
    log_share = divisions.draw(recipe.divisions, generator)
    step_s, overflow = score(problems, plans, log_share)
    if recipe.polish:
        better_plans, share = polished(problems, plans, log_share, step_s, overflow, recipe.polish, rng)
        plans = join(plans, network.replay(f, better_plans))
        with torch.set_grad_enabled(reads is None):
            divisions = network.divide(f, encoding, plans)
        log_share = torch.cat([log_share, divisions.around(share, recipe.divisions, generator)], 1)
        step_s, overflow = score(problems, plans, log_share)
    best = np.lexsort((step_s, overflow))[..., :1]
    of_best = [np.take_along_axis(a, best, 2)[..., 0] for a in (step_s, overflow)]
    if reads:
        chosen = reads(*of_best)
        of_best = [np.take_along_axis(a, chosen, 1) for a in of_best]
        step_s, overflow = (np.take_along_axis(a, chosen[..., None], 1) for a in (step_s, overflow))
        plans, log_share = plans.take(chosen), log_share[torch.arange(len(chosen))[:, None], torch.from_numpy(chosen)]
        divisions = network.divide(f, encoding, plans)
    of_all = (a.reshape(-1, a.shape[2]) for a in (step_s, overflow))
    levels = [(network.log_prob(f, encoding, plans), *of_best), (divisions.log_prob(log_share).flatten(0, 1), *of_all)]
    return sum(LOSSES[recipe.loss](*level) for level in levels)


def score(problems: Batch, plans: Groupings, log_share: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """[A, N, R] exact step times in s and [A, N, R] bytes over memory of drawn plans."""
    strategies = problems.strategies(plans.actions.numpy(), log_share.softmax(-1).double().numpy())
    return tuple(a.reshape(log_share.shape[:3]) for a in problems.step_times(*strategies))


def polished(problems: Batch, plans: Groupings, log_share: torch.Tensor, step_s: np.ndarray, overflow: np.ndarray,
             moves: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Actions [A, K] and shares of the work [A, S] of the best drawn plan of each instance after local search."""
    A, N, R, S = log_share.shape
    share = log_share.softmax(-1).double().numpy()
    best = np.lexsort((step_s.reshape(A, -1), overflow.reshape(A, -1)))[:, 0]
    n, r = best // R, best % R
    rows = np.arange(A)
    states = problems.strategies(plans.actions.numpy()[rows, n][:, None], share[rows, n, r][:, None, None])
    return annealed(problems, [tuple(part[a, 0].copy() for part in states) for a in rows], moves, POLISHED, rng)


def annealed(problems: Batch, states: list[tuple], moves: int, temperatures: tuple[float, float],
             rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Actions [A, K] and shares of the work [A, S] of what local search makes of a state of each instance."""
    layer_s = problems.forward_s + problems.backward_s
    work = np.pad(layer_work(layer_s).cumsum(1), ((0, 0), (1, 0)))
    speed, seed, actions, share = device_speed(layer_s), random_state(rng), [], []
    for a, state in enumerate(states):
        (bounds, order, starts), _, _ = Search(problems.problem(a)).run(state, moves, temperatures, seed)
        actions.append(disassemble(order, starts, speed[a]))
        share.append(np.diff(work[a, bounds]))
    return np.stack(actions), np.stack(share)


class Validation:
    """Held-out virtual instances with annealed reference plans: one set with a device a stage, one with groups."""

    SETS = (dict(K=8, S=8, L=40, M=16), dict(K=12, S=6, L=40, M=16))

    def __init__(self, seed: int, instances: int = 24, moves: int = 40_000):
        rng = np.random.default_rng([seed, 2**32 - 1])  # no training step has this number
        self.sets = []
        for size in self.SETS:
            for schedule, transfers in (("1f1b", "blocking"), ("gpipe", "overlapped")):
                problems = virtual.draw(rng, instances, **size, schedule=schedule, transfers=transfers)
                best = np.array([_annealed(problems.problem(a), rng, moves) for a in range(instances)])
                self.sets.append((problems, best))

    def gaps(self, network: Network) -> list[float]:
        """Mean step over the reference, minus 1, of the likeliest strategy and of the best of 32 x 4, for both sets."""
        out = []
        for group in (self.sets[:2], self.sets[2:]):
            greedy, best = [], []
            for problems, reference in group:
                f = network.features(problems)
                generator = torch.Generator().manual_seed(0)
                with torch.no_grad():
                    encoding = network.encode(f)
                    plans = network.draw(f, encoding, 32, generator, greedy=True)
                    log_share = network.divide(f, encoding, plans).draw(4, generator, greedy=True)
                step, overflow = (a.reshape(len(reference), -1) for a in score(problems, plans, log_share))
                usable = np.where(overflow > 0, 2 * step.max(1, keepdims=True), step)
                known = np.isfinite(reference)
                greedy.append((usable[:, 0] / reference)[known])
                best.append((usable.min(1) / reference)[known])
            out += [float(np.concatenate(greedy).mean() - 1), float(np.concatenate(best).mean() - 1)]
        return out


def _annealed(problem, rng, moves):
    """Step in s of the best of two annealing runs; infinite where no feasible plan was found."""
    _, step, overflow = restarts(problem, 2, moves, (0.1, 3e-4), rng)
    return step if overflow == 0 else np.inf


@contextlib.contextmanager
def _processes():
    """(rank, number of processes): torchrun's, or (0, 1)."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield 0, 1
        return
    distributed.init_process_group("gloo")
    try:
        yield distributed.get_rank(), world
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _average_gradients(network, world):
    if world == 1:
        return
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    distributed.all_reduce(flat)
    for g, mean in zip(gradients, (flat / world).split([g.numel() for g in gradients])):
        g.copy_(mean.view_as(g))


def _write_log(path, rows):
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(LOG_FIELDS)
    writer.writerows([row[0], *(f"{value:.6g}" for value in row[1:])] for row in rows)
    write_text(path, text.getvalue())


def command(recipe: Recipe, world: int = 1) -> str:
    """The command line of a recipe in so many processes, as far as `nnpiper train` has options for it."""
    program = ["nnpiper"] if world == 1 else ["torchrun", "--standalone", "--nproc-per-node", world, "-m", "nnpiper.cli"]
    parts, usual = [*program, "train", "--steps", recipe.steps, "--seed", recipe.seed], Recipe()
    for name in ("groupings", "learning_rate", "loss", "start"):
        if getattr(recipe, name) != getattr(usual, name):
            parts += [f"--{name.replace('_', '-')}", getattr(recipe, name)]
    parts += ["--no-grows"] * (not recipe.grows)
    return shlex.join(map(str, parts))


def _history(recipe, start, minutes, world):
    return {"recipe": asdict(recipe), **start, "command": command(recipe, world),
            "minutes": round(minutes, 1), "processes": world, "threads": torch.get_num_threads(),
            "processor": _processor(), "python": platform.python_version(), "torch": torch.__version__,
            "numpy": np.__version__, "data": "virtual instances only (nnpiper/virtual.py)"}


def _processor():
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
