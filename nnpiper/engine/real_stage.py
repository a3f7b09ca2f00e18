"""One process of a pipeline of real layers: a stage of a model on a device of its own speed, started by `real_model`.

python -m nnpiper.engine.real_stage RANK RANKS FOLDER: reads jobs as lines of JSON, runs each, answers with a line of
JSON. Forward, backward, loss, autograd, schedule and gloo are torch's; only the speed is emulated. A device of slowness
r does the work of an operation once and then sleeps until r times that work's own processor time has gone since the
operation began; the profile is taken on such a device, too. Limits on threads or priority would not do: they slow a
process by an amount that nobody states.

Two processes that compute at once on two cores may slow each other down (here by 1.7 to 2 times), so the processes take
turns: an operation waits for the file lock FOLDER/turn, works, gives it back. The wait for a turn, and for the
processor where other programs want it too, is part of the r - 1 parts that the device waits anyway; what goes beyond
(`late_s`) is recorded. It is rare while the sum of 1 / r stays below 1.

Symbols: S stages (ranks), M micro-batches of one sequence, s its length, h hidden size. Times are readings of the
monotonic clock, which all processes of a machine share.
"""

import datetime
import fcntl
import gc
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from .. import profiling
from ..workload import Model, chain
from .receives_first import receives_first

TIMEOUT_S = 180.0


class Stage(nn.Module):
    """Layers first, first + 1, ... of a model. Their dropout depends on layer and micro-batch alone, so that a split
    model computes what the whole one does; micro-batches pass in order, as in both schedules."""

    def __init__(self, model: Model, kinds: tuple[str, ...], first: int, micro_batches: int):
        super().__init__()
        self.first, self.micro_batches, self.passed = first, micro_batches, 0
        self.layers = nn.ModuleList()
        for number, kind in enumerate(kinds, first):
            torch.manual_seed(number)
            self.layers.append(profiling.layer(model, kind))

    def forward(self, x, targets=None):
        """Tokens [1, s] or activations [1, s, h] to activations, behind the head to the loss [1]."""
        m = self.passed % self.micro_batches
        self.passed += 1
        for number, layer in enumerate(self.layers, self.first):
            torch.manual_seed(1000 * (m + 1) + number)
            x = layer(x, targets)[None] if isinstance(layer, profiling.Head) else layer(x)
        return x

    def gradients(self) -> list[list[float]]:
        """[sum, norm] of the gradient of each parameter."""
        return [[p.grad.sum(dtype=torch.float64).item(), torch.linalg.vector_norm(p.grad, dtype=torch.float64).item()]
                for p in self.parameters()]


class Device:
    """Runs operations at 1 / slowness of the machine's speed; keeps (kind, micro-batch, begin, end, work_s, late_s)."""

    def __init__(self, slowness: float, turn):
        self.slowness, self.turn, self.operations = slowness, turn, []

    def slow(self, kind: str, function):
        """`function`, whose first argument is the micro-batch, as this device runs it."""
        def run(m, *arguments, **keywords):
            begin = time.monotonic()
            fcntl.flock(self.turn, fcntl.LOCK_EX)
            started = time.thread_time()  # autograd runs the backward pass of a CPU in the calling thread
            result = function(m, *arguments, **keywords)
            work_s = time.thread_time() - started
            fcntl.flock(self.turn, fcntl.LOCK_UN)
            rest_s = begin + self.slowness * work_s - time.monotonic()
            time.sleep(max(0.0, rest_s))
            self.operations.append([kind, m, begin, time.monotonic(), work_s, max(0.0, -rest_s)])
            return result
        return run


def batch(model: Model, sequence_length: int, micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [M, s], the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(model.vocabulary, (2, micro_batches, sequence_length), generator=generator))


def whole(model: Model, sequence_length: int, micro_batches: int) -> dict:
    """Losses [M] of the model in one piece, and the gradients of their sum, by parameter as in Stage.gradients."""
    module = Stage(model, chain(model, 1, sequence_length).kinds, 0, micro_batches)
    losses = []
    for tokens, targets in zip(*(part.split(1) for part in batch(model, sequence_length, micro_batches))):
        loss = module(tokens, targets)
        loss.backward()
        losses.append(loss.item())
    return {"losses": losses, "gradients": module.gradients()}


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not mix with the answers
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks,
                            timeout=datetime.timedelta(seconds=TIMEOUT_S))
    with open(folder / "turn", "w") as turn:
        for line in sys.stdin:
            job = json.loads(line)
            model = Model(**job.pop("model"))
            result = {"profile": _profile, "probe": _probe, "whole": _whole, "run": _run}[job.pop("do")](
                rank, turn, model, **job)
            print(json.dumps(result), file=answer, flush=True)
            gc.collect()  # a stage and its slowed-down operations hold each other, and with them all weights
    dist.destroy_process_group()


def _profile(rank, turn, model, sequence_length, slowness, repeats):
    """[L][forward s, backward s] at slowness 1, of the whole chain layer by layer on a device of this slowness, medians
    of `repeats` passes after two that warm up. The layers are those of `nnpiper profile`; they are not timed alone,
    each many times over, since a layer that finds its weights in a cache is faster than in a pipeline."""
    if rank > 0:
        return None
    layers = Stage(model, chain(model, 1, sequence_length).kinds, 0, 1).layers
    tokens, targets = batch(model, sequence_length, 1)
    device, L = Device(slowness, turn), len(layers)
    for _ in range(2 + repeats):
        reads, outputs = [tokens], []
        for number, layer in enumerate(layers):
            read = (reads[-1], targets) if isinstance(layer, profiling.Head) else (reads[-1],)
            outputs.append(device.slow("F", lambda _, layer=layer, read=read: layer(*read))(number))
            reads.append(outputs[-1].detach().requires_grad_())
        for number in reversed(range(L)):
            gradient = None if number == L - 1 else reads[number + 1].grad
            device.slow("B", lambda _, output=outputs[number], gradient=gradient: output.backward(gradient))(number)
    work_s = np.array([operation[4] for operation in device.operations]).reshape(2 + repeats, 2, L)
    work_s[:, 1] = work_s[:, 1, ::-1]
    return np.median(work_s[2:], axis=0).T.tolist()


def _probe(rank, turn, model, sequence_length, repeats):
    """Times in s of a message of one number and of an activation from rank 0 to rank 1, half a round trip each:
    [2][repeats]."""
    times = []
    for numbers in (1, sequence_length * model.hidden):
        message = torch.zeros(numbers)
        times.append([])
        for _ in range(repeats + 5 if rank < 2 else 0):  # the first warm up
            begin = time.monotonic()
            for sender in (0, 1):
                (dist.send if rank == sender else dist.recv)(message, 1 - rank)
            times[-1].append((time.monotonic() - begin) / 2)
    return [series[5:] for series in times]


def _whole(rank, turn, model, sequence_length, micro_batches):
    return whole(model, sequence_length, micro_batches) if rank == 0 else None


def _run(rank, turn, model, sequence_length, counts, slowness, micro_batches, schedule, steps):
    """Steps of one plan, counts [S] layers and slowness [S] of the devices: per step [begin, end], the operations and
    the losses [M] (of the last stage); of the first step the gradients."""
    S, first = len(counts), sum(counts[:rank])
    kinds = chain(model, 1, sequence_length).kinds[first:first + counts[rank]]
    module = Stage(model, kinds, first, micro_batches)
    tokens, targets = batch(model, sequence_length, micro_batches)
    activation = torch.zeros(1, sequence_length, model.hidden)
    is_first, is_last = rank == 0, rank == S - 1
    stage = PipelineStage(module, rank, S, torch.device("cpu"),
                          tokens[:1] if is_first else activation.clone().requires_grad_(),
                          (torch.zeros(1) if is_last else activation.clone()).requires_grad_())
    engine = get_schedule_class(schedule)(stage, micro_batches, loss_fn=lambda output, _: output[0],
                                          scale_grads=False)
    device = Device(slowness[rank], turn)
    stage.forward_one_chunk = device.slow("F", stage.forward_one_chunk)
    stage.backward_one_chunk = device.slow("B", stage.backward_one_chunk)
    spans, operations, losses, gradients = [], [], [], None
    for _ in range(steps):
        device.operations, seen = [], []
        dist.barrier()
        begin = time.monotonic()
        with receives_first():
            engine.step(*([tokens] if is_first else []), return_outputs=False,
                        **({"target": targets, "losses": seen, "targets": targets} if is_last else {}))
        spans.append([begin, time.monotonic()])
        operations.append(device.operations)
        losses.append([loss.item() for loss in seen])
        gradients = gradients or module.gradients()
    return {"spans": spans, "operations": operations, "losses": losses, "gradients": gradients}


if __name__ == "__main__":
    main()
