"""Planning: a cluster and a model -> the best plan that fits into memory, or what is short and what would help.

    cluster = cluster_file.load("lab.toml")
    found = plan(cluster, Request("gpt2-xl", micro_batches=32))
    print(found.step_s, found.bottleneck)
    plan_file = found.to_file()

Stages, layers and devices count from 0, as the model and the cluster do. Memory comes first: a plan that is over on any
device is never called feasible, and nothing is advised that was not tried.

Symbols: L layers, K devices, S stages, M micro-batches; F and B as in cost.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from . import cost
from .baselines.even import even_starts
from .bound import lower_bound
from .cluster import Cluster
from .cost import ALL_REDUCE, BACKWARD, FORWARD, SEND_BACKWARD, SEND_FORWARD
from .plan_advice import device_list, layer_range, other_sizes, remedies, size, with_fewer_devices
from .plan_file import PlanDevice, PlanFigures, PlanFile, StageFigures
from .plan_search import Request, Task, latency
from .problem import InputError, Problem, Strategy
from .solver import NNPiper
from .workload import Workload

__all__ = ["Plan", "Request", "StagePlan", "plan"]


@dataclass(frozen=True)
class StagePlan:
    """One stage. Times in s for one micro-batch, all_reduce_s once a step.

    layers: first_layer to last_layer by name; devices: titles; shares: of every micro-batch, one a device
    send_s: the activation to the next stage and the gradient to the one before
    idle_share: of the step, in which the stage does not compute
    tightest: the device with the least room, whose used_bytes and available_bytes these are
    """

    first_layer: int
    last_layer: int
    layers: str
    devices: tuple[str, ...]
    shares: tuple[float, ...]
    forward_s: float
    backward_s: float
    send_s: float
    all_reduce_s: float
    idle_share: float
    tightest: str
    used_bytes: float
    available_bytes: float


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan and what the exact simulator and the memory check say of it.

    step_s: of M micro-batches; latency_s: of one micro-batch through the empty pipeline and back
    bubble: share of the step in which a stage does not compute, mean over the stages
    bottleneck: the stage that is busy longest, and with what
    shortages: (stage, device title, bytes that it lacks); empty for a plan that fits
    unused: titles of the devices that the plan leaves out
    even_s: the objective's time of the even split over as many stages and the same schedule; None: it does not fit
    advice: lines, each of them tried: what is better or as good with less, or else what would make the model fit
    """

    request: Request
    cluster: Cluster
    workload: Workload
    problem: Problem
    strategy: Strategy
    stages: tuple[StagePlan, ...]
    step_s: float
    latency_s: float
    bubble: float
    bottleneck: str
    shortages: tuple[tuple[int, str, float], ...]
    unused: tuple[str, ...]
    even_s: float | None
    advice: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        return not self.shortages

    @cached_property
    def bound_s(self) -> float:
        """The objective's time of no plan with as many stages and the same schedule is less, certified (bound.py). Up
        to some seconds for ten or more devices, so it is worked out when it is first asked for."""
        p = self.problem
        p = p.replace(micro_batches=1) if self.request.objective == "latency" else p
        return lower_bound(p, self.objective_s if self.feasible else None)

    @property
    def objective_s(self) -> float:
        """What the plan was chosen for: the step or the latency."""
        return self.latency_s if self.request.objective == "latency" else self.step_s

    @property
    def samples_per_s(self) -> float | None:
        """Sequences a second; None where a step takes no time."""
        samples = self.problem.micro_batches * self.request.micro_batch_size
        return samples / self.step_s if self.step_s > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        """None where a step takes no time or the sequence length is not known."""
        if self.samples_per_s is None or self.request.tokens is None:
            return None
        return self.samples_per_s * self.request.tokens

    @property
    def speedup(self) -> float | None:
        """Over the even split, 1.25 being a quarter faster; None where that does not fit."""
        return self.even_s / self.objective_s if self.even_s is not None and self.objective_s > 0 else None

    @property
    def shortage_lines(self) -> list[str]:
        """One line for every device that lacks memory."""
        return [f"stage {stage} on {device} is short by {size(missing)}" for stage, device, missing in self.shortages]

    def to_file(self) -> PlanFile:
        """The plan with its names, as `nnpiper export` reads it. Raises InputError where the plan does not fit or its
        sequence length is not known."""
        if not self.feasible:
            raise InputError(f"plan: {'; '.join(self.shortage_lines)}; allowed: a plan that fits into memory")
        if self.request.tokens is None:
            raise InputError("sequence_length: None; allowed: the length of the given workload's sequences")
        cluster = self.cluster
        devices = [PlanDevice(name=cluster.labels[k], title=cluster.titles[k],
                              node=cluster.node_names[cluster.node[k]], index=index)
                   for k, index in enumerate(cluster.index_in_node)]
        stages = [StageFigures(
            forward_s=s.forward_s, backward_s=s.backward_s, send_s=s.send_s, all_reduce_s=s.all_reduce_s,
            idle_share=s.idle_share, shares=list(s.shares), memory_used_bytes=s.used_bytes,
            memory_available_bytes=s.available_bytes) for s in self.stages]
        figures = PlanFigures(
            objective=self.request.objective, latency_s=self.latency_s, samples_per_s=self.samples_per_s,
            tokens_per_s=self.tokens_per_s, bubble=self.bubble, bottleneck=self.bottleneck, even_s=self.even_s,
            bound_s=self.bound_s, unused=list(self.unused), advice=list(self.advice), stages=stages)
        return PlanFile(
            model=self.workload.name, layer_kinds=list(self.workload.kinds), micro_batches=self.problem.micro_batches,
            micro_batch_size=self.request.micro_batch_size, sequence_length=self.request.tokens,
            schedule=self.problem.schedule, transfers=self.problem.transfers, recompute=self.request.recompute,
            devices=devices, cuts=list(self.strategy.cuts), groups=[list(group) for group in self.strategy.groups],
            step_s=self.step_s, figures=figures)


def plan(cluster: Cluster, request: Request, piper: NNPiper | None = None, seed: int = 0) -> Plan:
    """The best plan found: one that fits into memory if any was met, else the nearest, with `shortages` and with what
    would help in `advice`. piper: None loads the shipped solver. Raises InputError."""
    task = Task.of(cluster, request, piper or NNPiper.from_pretrained(), seed)
    best, scanned = task.search(task.sizes())
    if best.overflow_bytes > 0:
        return _described(task, best, remedies(task))
    best, fewer_devices = with_fewer_devices(task, best)
    return _described(task, best, [*other_sizes(task, best, scanned), *fewer_devices])


def _described(task, best, advice):
    """The plan with everything that is said of it."""
    p, strategy, cluster = best.problem, best.strategy, task.cluster
    M, titles = p.micro_batches, [cluster.title(k) for k in range(p.devices)]
    rows, used = cost.stage_arrays(p, strategy).matrix(), cost.memory_used(p, strategy)
    idle = 1.0 - M * (rows[FORWARD] + rows[BACKWARD]) / best.step_s if best.step_s > 0 else np.zeros(p.stages)
    idle = np.maximum(idle, 0.0)  # rounding
    sends = rows[SEND_FORWARD] + np.roll(rows[SEND_BACKWARD], 1)
    bounds = strategy.bounds(p.layers)
    stages, shortages = [], []
    for s, group in enumerate(strategy.groups):
        devices, layers = list(group), slice(bounds[s], bounds[s + 1])
        alone = np.maximum((p.forward_s + p.backward_s)[layers, devices].sum(axis=0), 1e-30)
        tightest = max(group, key=lambda k: used[k] - p.memory_bytes[k])
        stages.append(StagePlan(
            bounds[s], bounds[s + 1] - 1, layer_range(task.workload.layer_names[layers]),
            tuple(titles[k] for k in group), tuple((1.0 / alone / (1.0 / alone).sum()).tolist()),
            float(rows[FORWARD, s]), float(rows[BACKWARD, s]), float(sends[s]), float(rows[ALL_REDUCE, s]),
            float(idle[s]), titles[tightest], float(used[tightest]), float(p.memory_bytes[tightest])))
        shortages += [(s, titles[k], float(used[k] - p.memory_bytes[k])) for k in group if used[k] > p.memory_bytes[k]]
    even = _even(task, best)
    working = {k for group in strategy.groups for k in group}
    return Plan(
        task.request, cluster, task.workload, p, strategy, tuple(stages), best.step_s, latency(p, strategy),
        float(idle.mean()), _bottleneck(p, strategy, rows, titles, best.step_s), tuple(shortages),
        tuple(titles[k] for k in range(p.devices) if k not in working),
        even.value_s if even.overflow_bytes == 0 else None, tuple(advice))


def _even(task, best):
    """Equal layer counts on runs of as many devices as are allowed, in the cluster's order."""
    p = best.problem
    starts = even_starts(min(task.most, p.stages * task.request.micro_batch_size), p.stages)
    groups = tuple(tuple(range(first, last)) for first, last in zip(starts, starts[1:]))
    return task.judge(p, Strategy(tuple(even_starts(p.layers, p.stages)[1:-1]), groups))


def _bottleneck(p, strategy, rows, titles, step_s):
    """The stage that is busy longest in a step and what it is busy with most. Where transfers run beside compute,
    compute and the two directions of each link are busy each on its own."""
    M, S = p.micro_batches, p.stages
    work = M * (rows[FORWARD] + rows[BACKWARD])
    ahead, back = M * rows[SEND_FORWARD], M * np.roll(rows[SEND_BACKWARD], 1)
    parts = np.stack([work, ahead, back, rows[ALL_REDUCE]])
    stage = int(np.argmax(parts.sum(axis=0) if p.transfers == "blocking" else parts.max(axis=0)))
    part = int(np.argmax(parts[:, stage]))
    group = strategy.groups[stage]
    if part in (1, 2):
        other = stage + 1 if part == 1 else stage - 1
        bytes_sent = p.output_bytes[strategy.bounds(p.layers)[max(stage, other)] - 1]
        g, h = max(((g, h) for g in group for h in strategy.groups[other]), key=lambda pair: p.latency_s[pair] +
                   bytes_sent / p.bandwidth_bytes_per_s[pair])
        what = f"link {titles[g]} -> {titles[h]}, {'activations' if part == 1 else 'gradients'} to stage {other}"
    else:
        what = f"{'all-reduce' if part == 3 else 'compute'} on {device_list([titles[k] for k in group])}"
    busy = parts[part, stage] / step_s if step_s > 0 else 0.0
    return f"stage {stage}: {what} ({busy:.0%} of the step)"
