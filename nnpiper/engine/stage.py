"""One stage of an emulated pipeline: a process in a network namespace of its own, started by `hub`.

python -m nnpiper.engine.stage RANK RANKS: reads jobs as lines of JSON, runs each, answers with a line of JSON, and
with {"failed": what, "at_s": when} before it ends where something goes wrong. Compute is an autograd function that
sleeps; everything else (schedule, autograd, gloo, TCP) is real. All times are readings of the monotonic clock, which
all processes of a machine share.
"""

import datetime
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from . import links

TIMEOUT_S = 60.0
WEIGHTS = (1.0, 1.25, 0.5, 2.0, 0.75, 1.5, 1.0, 1.0)  # of each stage's linear map, by rank
STORE_PORT = 29400
SLACK = 29, 1  # prctl(PR_SET_TIMERSLACK, 1 ns): sleeps may else be 50 us longer


def main() -> None:
    rank, ranks = map(int, sys.argv[1:])
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not mix with the answers

    def tell(result):
        print(json.dumps(result), file=answer, flush=True)

    try:
        _serve(rank, ranks, tell)
    except Exception as error:  # whatever it is, the hub says it in one line, instead of a traceback from each stage
        what = str(error).partition("\n")[0]
        tell({"failed": what if isinstance(error, OSError) else f"{type(error).__name__}: {what}",
              "at_s": time.monotonic()})
        os._exit(1)  # gloo's threads may still wait for the others


def _serve(rank, ranks, tell):
    tell({})  # inside the namespace
    sys.stdin.readline()  # the cable is there
    _connect(rank, ranks)
    tell({})
    groups = {}
    for line in sys.stdin:
        job = json.loads(line)
        do = job.pop("do")
        if do == "join":
            groups = _join(rank, ranks)
            tell({"torch": _torch_version()})
        else:
            tell({"probe": _probe, "run": _run}[do](rank, groups, **job))


def _connect(rank, ranks):
    links.configure("ip", links.interface_text(rank))
    links.configure("tc", links.classes_text(rank, ranks))
    for name, value in links.SETTINGS.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)


def _join(rank, ranks):
    """{S: process group of the first S ranks}."""
    import ctypes

    import torch
    import torch.distributed as dist

    ctypes.CDLL(None).prctl(*SLACK, 0, 0, 0)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(links.address(0), STORE_PORT, ranks, rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    return {S: dist.new_group(list(range(S))) for S in range(1, ranks + 1)}


def _torch_version():
    import torch
    return torch.__version__


def _set_rates(bytes_per_s):
    links.configure("tc", links.rates_text({int(peer): rate for peer, rate in bytes_per_s.items()}))


def _probe(rank, groups, rates, bytes, repeats, pause_s):
    """Half a round trip in s of messages from rank 0 to rank 1 and back, each after a pause."""
    import torch
    import torch.distributed as dist

    if rank > 1:
        return None
    _set_rates(rates[rank])
    message, times = torch.zeros(bytes // 4), []
    for _ in range(repeats + 1):  # the first warms up
        time.sleep(pause_s)
        begin = time.monotonic()
        for turn in (0, 1):
            if rank == turn:
                dist.send(message, 1 - rank, groups[2])
            else:
                dist.recv(message, 1 - rank, groups[2])
        times.append((time.monotonic() - begin) / 2)
    return times[1:]


def _run(rank, groups, stages, micro_batches, schedule, forward_s, backward_s, all_reduce_s, output_bytes, rates,
         steps, receives_first):
    """A warm-up and the steps of one strategy; None from ranks that have no stage. `spans`: [begin, end] of each step;
    `operations`: [kind, micro-batch, begin, end] of the last; `gradient`: what the stage's weight got in it; `sent`:
    bytes that left the stage in the last, headers included."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    from . import emulated
    from .receives_first import receives_first as receives_before_sends

    if rank >= stages:
        return None
    _set_rates(rates[rank])
    numbers = [1, *(max(1, size // 4) for size in output_bytes), 1]  # float32 that enter each stage, and leave the last
    module = emulated.Stage(numbers[rank + 1], WEIGHTS[rank])
    enters, leaves = torch.zeros(1, numbers[rank]), torch.zeros(1, numbers[rank + 1])
    stage = PipelineStage(module, rank, stages, torch.device("cpu"), enters.requires_grad_(rank > 0),
                          leaves.requires_grad_(), group=groups[stages])
    engine = get_schedule_class(schedule)(stage, micro_batches, loss_fn=lambda output, _: output[0, 0],
                                          scale_grads=False)
    inputs = (1.0 + torch.arange(micro_batches, dtype=torch.float32)[:, None],) if rank == 0 else ()
    target = {"target": torch.zeros(micro_batches, 1)} if rank == stages - 1 else {}
    spans = []
    with receives_before_sends() if receives_first else nullcontext():
        for step in range(steps + 1):
            module.reset(*((forward_s[rank], backward_s[rank]) if step else (0.0, 0.0)))
            dist.barrier(groups[stages])
            begin, before = time.monotonic(), _sent_bytes()
            engine.step(*inputs, **target)
            if step:
                time.sleep(all_reduce_s[rank])
            spans.append([begin, time.monotonic()])
    return {"spans": spans[1:], "operations": module.operations, "gradient": module.weight.grad.item(),
            "sent": _sent_bytes() - before}


def _sent_bytes():
    """What left eth0 since it is up: column 9 of its line."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line.split()[9] for line in lines if line.strip().startswith("eth0:")))


if __name__ == "__main__":
    main()
